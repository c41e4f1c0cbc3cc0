"""Rollback of sharded optimizer state: a scenario for tests.support.parallel.runner."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from ckpt import Checkpointer
from ckpt.capture.optimizers import state_holder
from tests.support.parallel.zero import ZeroRedundancyOptimizer
from tests.support.training import same_state, seed_all


def roll_back(store: str, sharding: str) -> dict[str, Any]:
    """Whether the state before the first step was restored after three, and whether three more equal the first."""
    model, optim = _make(sharding)

    def train() -> list[Any]:
        for step in range(3):
            values = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            model(values).square().mean().backward()
            optim.step()
            optim.zero_grad()
        return _state(model, optim)

    with Checkpointer(store, run="r", writer="thread") as checkpointer:
        checkpointer.save(model, optim, 0)
        start = _state(model, optim)
        trained = train()
        checkpointer.restore(model, optim)
        restored = same_state(_state(model, optim), start)
    return {"restored": restored, "trained": same_state(train(), trained)}


def _make(sharding: str) -> tuple[nn.Module, Optimizer]:
    seed_all(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    if sharding == "zero":
        return model, ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.01)
    if sharding == "fsdp2":
        fully_shard(model)
    else:
        originals = sharding == "fsdp1"
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=originals)
    return model, AdamW(model.parameters(), lr=0.01)


def _state(model: nn.Module, optim: Optimizer) -> list[Any]:
    """What this rank holds."""
    kept = state_holder(optim).state
    parameters = list(model.parameters())
    return deepcopy([
        [_local(p) for p in parameters],
        [{name: _local(value) for name, value in kept[p].items()} if p in kept else None for p in parameters],
    ])  # fmt: skip


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
