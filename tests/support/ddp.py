"""Ranks as real processes with gloo, over a file: no port to collide on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_ranks(script: str, world_size: int, folder: Path, *arguments: str, timeout: float = 120) -> list[str]:
    """Run tests.support.<script> in every rank; returns their output, or raises with it."""
    meeting = folder / f"meeting-{len(list(folder.iterdir()))}"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-m", f"tests.support.{script}", *arguments],
            cwd=ROOT,
            env=_environment(rank, world_size, meeting),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [rank.communicate(timeout=timeout)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    failed = [output for rank, output in zip(ranks, outputs, strict=True) if rank.returncode != 0]
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
    """Non-empty lines of an output."""
    return [line for line in output.splitlines() if line]
