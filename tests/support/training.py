"""Small deterministic training runs, for tests that compare a resumed one with an uninterrupted one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer


class Net(nn.Module):
    """Embedding tied to the output, batch norm with buffers, dropout that draws random numbers, a frozen layer."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 24)
        self.frozen = nn.Linear(24, 24)
        self.norm = nn.BatchNorm1d(24)
        self.hidden = nn.Linear(24, 24)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(24, 31, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += tokens.numel()
        hidden = self.norm(self.frozen(self.embed(tokens)))
        out: torch.Tensor = self.head(self.drop(torch.tanh(self.hidden(hidden))))
        return out


OptimizerFactory = Callable[[Iterable[torch.Tensor]], Optimizer]


@dataclass
class Loop:
    """A model, its optimizer and schedule, and one step of training that uses every random number generator."""

    optimizer: OptimizerFactory
    scheduler: Callable[[Optimizer], Any] | None = None
    autocast: bool = False
    scaler: Any = None
    seed: int = 0
    model: Net = field(init=False)
    optim: Optimizer = field(init=False)
    sched: Any = field(init=False)

    def __post_init__(self) -> None:
        seed_all(self.seed)
        self.model = Net()
        self.optim = self.optimizer([p for p in self.model.parameters() if p.requires_grad])
        self.sched = self.scheduler(self.optim) if self.scheduler else None

    def backward(self) -> float:
        """One forward and backward pass; gradients add up."""
        shift = random.randrange(31) + int(np.random.randint(31))
        tokens = (torch.randint(0, 31, (16,)) + shift) % 31
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
            loss = nn.functional.cross_entropy(self.model(tokens).float(), (tokens * 7 + 1) % 31)
        (self.scaler.scale(loss) if self.scaler else loss).backward()
        return loss.item()

    def update(self) -> None:
        """One optimizer step on the gradients."""
        if self.scaler:
            self.scaler.step(self.optim)
            self.scaler.update()
        else:
            self.optim.step()
        if self.sched is not None:
            self.sched.step()
        self.optim.zero_grad()

    def step(self) -> float:
        if isinstance(self.optim, torch.optim.LBFGS):
            losses: list[float] = []

            def closure() -> float:
                self.optim.zero_grad()
                losses.append(self.backward())
                return losses[-1]

            self.optim.step(closure)  # type: ignore[no-untyped-call]
            return losses[0]
        loss = self.backward()
        self.update()
        return loss

    def extras(self) -> dict[str, Any]:
        found = {"scheduler": self.sched, "scaler": self.scaler}
        return {name: value for name, value in found.items() if value is not None}


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def same_state(left: Any, right: Any) -> bool:
    """Whether two nested states are equal to the bit, types included."""
    if isinstance(left, torch.Tensor):
        return (
            isinstance(right, torch.Tensor)
            and (left.dtype, left.shape) == (right.dtype, right.shape)
            and tensor_bits(left) == tensor_bits(right)
        )
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same_state(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(same_state(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right) or (left != left and right != right)


def tensor_bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor's elements."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
