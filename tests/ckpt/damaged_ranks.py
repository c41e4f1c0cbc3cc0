"""Ranks of which one finds damage: a scenario for tests.support.parallel.runner."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from torch import nn

from ckpt import Checkpointer
from ckptstore.names import RunKeys, shard_name

RUN = "stages"


def restore_after_damage(store: str) -> list[int]:
    """Every rank has a stage of its own; that of rank 1 is damaged in the newer of two checkpoints.

    Returns the restored step, and the latest one after that.
    """
    rank = dist.get_rank()
    model = nn.ModuleDict({f"stage{rank}": nn.Linear(64, 64)})
    with Checkpointer(store, run=RUN, writer="thread", max_references=0) as checkpointer:
        newest = [checkpointer.save(model, None, step) for step in (1, 2)][-1]
        if rank == 1:
            path = Path(store) / RunKeys(RUN).shard(newest.attempt, shard_name(rank))
            path.write_bytes(bytes(8) + path.read_bytes()[8:])
        dist.barrier()
        restored = checkpointer.restore(model)
        latest = checkpointer.latest()
    assert restored is not None
    assert latest is not None
    return [restored.step, latest.step]
