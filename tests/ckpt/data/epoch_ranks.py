"""An epoch whose world size changes: scenarios for tests.support.parallel.runner."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import ckpt
from ckpt import Checkpointer


def train(store: str, step: int, num_batches: int | None, kind: str) -> list[int]:
    """Resume, take batches, save. Returns the numbers of the samples that this rank got."""
    torch.manual_seed(step)
    numbers: Any = list(range(48))
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    sampler: Any = DistributedSampler(numbers, size, rank, seed=3)
    make: Any = StatefulDataLoader if kind == "stateful" else DataLoader
    with warnings.catch_warnings(action="ignore"):  # torchdata calls what torch has deprecated
        loader = ckpt.data.resumable(make(numbers, batch_size=2, sampler=sampler))
    model = nn.Linear(2, 2)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[int] = []
    with Checkpointer(store, run=kind, writer="thread") as checkpointer:
        checkpointer.restore(model, optim, loader=loader)
        for batch in loader:
            seen += batch.tolist()
            if num_batches is not None and len(seen) == 2 * num_batches:
                checkpointer.save(model, optim, step, loader=loader)
                break
    return seen
