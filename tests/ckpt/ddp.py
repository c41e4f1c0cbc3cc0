"""Ranks as real processes with gloo, over a file: no port to collide on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tests.support.forking import TRAINER, fork

ROOT = Path(__file__).parents[2]


def run_ranks(module: str, world_size: int, folder: Path, *arguments: str, timeout: float = 120) -> list[str]:
    """Run a module in every rank; returns their output, or raises with it."""
    number = len(list(folder.iterdir()))
    logs = [folder / f"output-{number}-{rank}" for rank in range(world_size)]
    ranks = []
    for rank, path in enumerate(logs):
        environment = _environment(rank, world_size, folder / f"meeting-{number}")
        with path.open("wb") as log:
            output = log.fileno()
            ranks.append(
                fork(
                    TRAINER, module, arguments,
                    stdout=output, stderr=output, environment=environment, strict=True,
                )
            )  # fmt: skip
    try:
        for running in ranks:
            running.wait(timeout)
    finally:
        for running in ranks:
            running.kill()
            running.wait()
    outputs = [path.read_text() for path in logs]
    failed = [output for running, output in zip(ranks, outputs, strict=True) if running.returncode != 0]
    if failed:
        raise AssertionError("\n".join(failed))
    return outputs


def join() -> int:
    """In a rank: join the group; returns the rank."""
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "gloo", init_method=f"file://{os.environ['MEETING']}", rank=rank, world_size=int(os.environ["WORLD_SIZE"])
    )
    return rank


def _environment(rank: int, world_size: int, meeting: Path) -> dict[str, str]:
    own = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MEETING": str(meeting), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own}


def lines(output: str) -> Sequence[str]:
    return [line for line in output.splitlines() if line]
