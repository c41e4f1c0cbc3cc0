"""Random numbers and a data position of each rank: scenarios for tests.support.parallel.runner."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ckpt import Checkpointer
from tests.support.training import seed_all


class Samples:
    """Ten samples; rank r of n sees every n-th, from r on."""

    def __init__(self) -> None:
        rank, size = _rank(), _size()
        self.left = list(range(10))[rank::size]

    def state_dict(self) -> dict[str, Any]:
        return {"left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = state["left"]

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        shared = sorted(sample for state in states for sample in state["left"])
        self.left = shared[_rank() :: _size()]


def save(store: str) -> dict[str, Any]:
    """After two samples of each rank; the numbers that come next."""
    seed_all(_rank())
    model, samples = nn.Linear(3, 3), Samples()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    del samples.left[:2]
    with Checkpointer(store, run="r", writer="thread") as checkpointer:
        checkpointer.save(model, None, 1, loader=samples)
    return {"drawn": _draw()}


def restore(store: str) -> dict[str, Any]:
    """What this rank goes on with."""
    seed_all(99)
    samples = Samples()
    with Checkpointer(store, run="r", writer="thread") as checkpointer:
        restored = checkpointer.restore(nn.Linear(3, 3), loader=samples)
    assert restored is not None
    return {"drawn": _draw(), "left": samples.left, "notes": restored.notes}


def optimizer_on_one_rank(store: str, rank: int) -> list[int | None]:
    """The steps that restores of an empty and of a saved run gave; only `rank` has an optimizer."""
    model = nn.Linear(3, 3)
    optim = torch.optim.SGD(model.parameters(), lr=0.1) if _rank() == rank else None
    steps: list[int | None] = []
    for step in (1, 2):
        with Checkpointer(store, run="r", writer="thread", peer_timeout_s=30) as checkpointer:
            restored = checkpointer.restore(model, optim)
            steps.append(None if restored is None else restored.step)
            checkpointer.save(model, optim, step)
            restored = checkpointer.restore(model, optim)  # after ranks have agreed
            steps.append(None if restored is None else restored.step)
    return steps


def _draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
