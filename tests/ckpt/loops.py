"""A training loop with every kind of change that a save has to distinguish, under several optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer

from ckpt import Checkpointer


class Net(nn.Module):
    """Batch norm, whose buffers change in forward; dropout; a layer that is not contiguous; a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 96)
        self.norm = nn.BatchNorm1d(96)
        self.frozen = nn.Linear(96, 96).requires_grad_(False)
        self.last = nn.Linear(96, 64)
        self.last.weight.data = self.last.weight.data.t().contiguous().t()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(torch.relu(self.norm(self.first(inputs))))
        out: torch.Tensor = self.last(torch.dropout(hidden, 0.1, train=True))
        return out


class Loop:
    """A model, its optimizers, and a step of training on random numbers."""

    def __init__(self, make: Callable[[list[torch.Tensor]], Any], seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = Net()
        self.optim = make([p for p in self.model.parameters() if p.requires_grad])

    def backward(self) -> torch.Tensor:
        loss: torch.Tensor = (self.model(torch.randn(16, 64)) - 1).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def closure(self) -> float:
        self.model.zero_grad()
        return self.backward().item()

    def step(self) -> None:
        if isinstance(self.optim, LBFGS):
            self.optim.step(self.closure)  # type: ignore[no-untyped-call]
            return
        self.backward()
        for optimizer in self.optimizers():
            optimizer.step()
        self.model.zero_grad()

    def optimizers(self) -> Iterable[Optimizer]:
        return self.optim.values() if isinstance(self.optim, dict) else [self.optim]

    def state(self) -> Any:
        found = (self.model.state_dict(), [optimizer.state_dict() for optimizer in self.optimizers()])
        return copy.deepcopy(found), torch.get_rng_state()


OPTIMIZERS: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "adamw": lambda p: AdamW(p, lr=0.01, foreach=False),
    "adamw-foreach": lambda p: AdamW(p, lr=0.01, foreach=True),
    "adamw-fused": lambda p: AdamW(p, lr=0.01, fused=True),
    "sgd-momentum": lambda p: SGD(p, lr=0.01, momentum=0.9),
    "lbfgs": lambda p: LBFGS([q for q in p if q.is_contiguous()], lr=0.1, max_iter=3),
    "two": lambda p: {"a": AdamW(p[:2], lr=0.01), "b": SGD(p[2:], lr=0.01, momentum=0.9)},
}


def open_run(folder: Path, **options: Any) -> Checkpointer:
    return Checkpointer(str(folder), run="r", **{"writer": "thread", **options})
