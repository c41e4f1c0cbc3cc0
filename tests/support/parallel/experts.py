"""Experts with soft routing: every token visits every expert, wherever it lives."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Experts(nn.Module):
    """The experts this rank has, under their global numbers.

    Where ranks have different ones, `exchange` is set: tokens of all ranks visit the experts of each, and the
    answers are summed.
    """

    def __init__(self, width: int, total: int, own: dict[int, nn.Module]) -> None:
        super().__init__()
        self.router = nn.Linear(width, total)
        self.experts = nn.ModuleDict({str(number): expert for number, expert in own.items()})
        self.exchange = False

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        if not self.exchange:
            return self._visit(x, weights)
        everyone = _sum(_placed(torch.cat([x, weights], -1)))
        answers = _sum(self._visit(everyone[..., : x.shape[-1]], everyone[..., x.shape[-1] :]))
        return answers.view(dist.get_world_size(), *x.shape)[dist.get_rank()]

    def _visit(self, x: Tensor, weights: Tensor) -> Tensor:
        parts = [weights[..., int(number), None] * expert(x) for number, expert in self.experts.items()]
        return cast(Tensor, sum(parts[1:], start=parts[0]))


class _Sum(torch.autograd.Function):
    """All-reduce; the gradient of a sum over ranks is the sum of their gradients."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total)
        return total


def _sum(x: Tensor) -> Tensor:
    return cast(Tensor, _Sum.apply(x))  # type: ignore[no-untyped-call]


def _placed(x: Tensor) -> Tensor:
    """This rank's rows among zeros for the others'."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return torch.cat([x if index == rank else torch.zeros_like(x) for index in range(world)])
