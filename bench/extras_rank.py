"""One rank of the benchmark restore-extras: saves, restores in all ways in turns, and compares every element.

`first_restore` runs in a process of its own and restores once.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.measuring import REPETITIONS, read_files, rotated
from ckpt import Checkpointer

LOAD = "torch.load"
WAYS = ("own, in place", "own, new", "shared, in place", "shared, new")
TENSOR_BYTES = 8 << 20
SAVES = 4
Tensors = dict[str, torch.Tensor]


class Rank:
    """A rank, with a run for its own tensors and another for shared ones."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self.rank = dist.get_rank()
        self.count = max(1, num_bytes // TENSOR_BYTES)
        self.runs = {
            kind: Checkpointer(str(folder / kind), run="r", slots=1, compress="off") for kind in ("own", "shared")
        }
        self.saved = {"own": self.values(self.rank), "shared": self.values(-1)}
        self.file = folder / f"{self.rank}.pt"

    def values(self, seed: int) -> Tensors:
        """Equal for equal seeds."""
        noise = torch.Generator().manual_seed(seed + 1)
        return {f"t{i}": torch.rand(TENSOR_BYTES // 4, generator=noise) for i in range(self.count)}

    def save(self) -> list[float]:
        """The stalls of saves of own tensors, each begun when the one before it is durable. Also saves all others."""
        torch.save(self.saved["own"], self.file)
        self.runs["own"].prepare(None, None, own=self.saved["own"])
        stalls = []
        for step in range(SAVES):
            began = time.perf_counter()
            handle = self.runs["own"].save_async(None, None, step, own=self.saved["own"])
            stalls.append(time.perf_counter() - began)
            handle.result()
        self.runs["shared"].save(None, None, 0, shared={"shared": self.saved["shared"]})
        return stalls

    def restore(self, way: str, live: Tensors | None) -> Tensors:
        """Into the live tensors, or new ones."""
        kind, run = way.partition(",")[0], self.runs[way.partition(",")[0]]
        restored = run.restore(own=live) if kind == "own" else run.restore(shared={"shared": live})
        assert restored is not None
        found: Tensors = restored.values[kind]
        return found

    def once(self, name: str) -> tuple[float, float]:
        """Wall seconds until all ranks are done, and core seconds of this one. Raises RuntimeError for wrong values."""
        live = {key: torch.zeros_like(one) for key, one in self.saved["own"].items()} if "in place" in name else None
        load: Callable[[], Tensors] = partial(self.restore, name, live)
        if name == LOAD:
            load = partial(torch.load, self.file)
        dist.barrier()
        began, core_began = time.perf_counter(), time.process_time()
        found = load()
        core_s = time.process_time() - core_began
        dist.barrier()
        wall_s = time.perf_counter() - began
        wanted = self.saved["shared" if name.startswith("shared") else "own"]
        if not all(torch.equal(found[key], one) for key, one in wanted.items()):
            raise RuntimeError(f"rank {self.rank} restored other values ({name})")
        if live is not None and any(found[key] is not one for key, one in live.items()):
            raise RuntimeError(f"rank {self.rank} did not restore in place ({name})")
        return wall_s, core_s

    def close(self) -> None:
        """Collective."""
        for run in self.runs.values():
            run.close()
        dist.destroy_process_group()


def join(folder: Path, num_bytes: int) -> Rank:
    """Join the process group as the rank that the environment names."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    logging.getLogger("ckpt").setLevel(logging.ERROR)
    return Rank(folder, num_bytes)


def first_restore(folder: Path, num_bytes: int, name: str, environment: Mapping[str, str], rank: int) -> float:
    """Wall seconds of the first restore of a process. Runs in a process forked after all imports."""
    os.environ.update(environment, RANK=str(rank))
    one = join(folder, num_bytes)
    wall_s, _ = one.once(name)
    one.close()
    return wall_s


def main() -> None:
    """Rank 0 prints the result."""
    folder, names = Path(sys.argv[1]), [*WAYS, LOAD]
    one = join(folder, int(sys.argv[2]))
    rank, world = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {name: {"wall_s": [], "core_s": []} for name in names}
    found["stall"] = {"wall_s": one.save()}
    if rank == 0:
        read_files(folder)
    for repetition in range(REPETITIONS + 1):  # the first warms up
        for name in rotated(names, repetition):
            wall_s, core_s = one.once(name)
            cores: list[Any] = [None] * world
            dist.all_gather_object(cores, core_s)
            if repetition > 0:
                found[name]["wall_s"].append(wall_s)
                found[name]["core_s"].append(sum(cores))
    one.close()
    if rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
