"""A small transformer with the shapes that break sharding: odd, tiny, empty when divided, scalar, frozen, tied."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

HEADS = 2
TOKENS = 6


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model. The default ones divide by no world size, and (3,) and (1, width) are smaller than some."""

    width: int = 10
    hidden: int = 27
    vocabulary: int = 33
    layers: int = 3
    tied: bool = False
    experts: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """Which layers a chunk of the model has; parameters keep the names they have in the whole model."""

    blocks: tuple[int, ...]
    first: bool
    last: bool
    experts: tuple[int, ...] = ()

    @staticmethod
    def whole(shape: Shape) -> Part:
        """All layers, all experts."""
        return Part(tuple(range(shape.layers)), first=True, last=True, experts=tuple(range(shape.experts)))


class Attention(nn.Module):
    """Causal self-attention; under tensor parallelism each rank has its own heads."""

    mask: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head_width = width // HEADS
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width, bias=False)  # a bias of keys has no gradient but rounding
        self.v = nn.Linear(width, width)
        self.o = nn.Linear(width, width)
        self.register_buffer("mask", torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._heads(linear(x)) for linear in (self.q, self.k, self.v))
        scores = (q @ k.transpose(-1, -2) / self.head_width**0.5).masked_fill(self.mask, float("-inf"))
        mixed = (scores.softmax(-1) @ v).transpose(1, 2)
        return cast(Tensor, self.o(mixed.reshape(*x.shape[:2], -1)))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_width).transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down(functional.gelu(self.up(x))))


class Block(nn.Module):
    """Attention and an MLP or experts, with a (3,) and a (1, width) parameter and statistics that move in forward."""

    running: Tensor
    calls: Tensor

    def __init__(self, shape: Shape, experts: tuple[int, ...]) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width)
        self.attn = Attention(shape.width)
        self.norm2 = nn.LayerNorm(shape.width)
        if shape.experts:
            own: dict[int, nn.Module] = {number: MLP(shape.width, shape.hidden) for number in experts}
            self.mlp: nn.Module = Experts(shape.width, shape.experts, own)
        else:
            self.mlp = MLP(shape.width, shape.hidden)
        self.mix = nn.Parameter(torch.empty(3))
        self.shift = nn.Parameter(torch.empty(1, shape.width))
        self.register_buffer("running", torch.zeros(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.running.lerp_(self.mix.detach(), 0.1)
                self.calls += 1
        keep, attend, think = self.mix + 0.1 * self.running
        x = (1 + keep) * x + (1 + attend) * self.attn(self.norm1(x))
        return cast(Tensor, x + (1 + think) * self.mlp(self.norm2(x)) + self.shift)


class Transformer(nn.Module):
    """The whole model or one part of it: tokens or activations in, logits or activations out."""

    def __init__(self, shape: Shape, part: Part, seed: int = 0) -> None:
        super().__init__()
        self.part = part
        if part.first:
            self.tok = nn.Embedding(shape.vocabulary, shape.width)
            self.position = nn.Parameter(torch.empty(TOKENS, shape.width), requires_grad=False)
        self.blocks = nn.ModuleDict({str(index): Block(shape, part.experts) for index in part.blocks})
        if part.last:
            self.norm = nn.LayerNorm(shape.width)
            self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
            self.scale = nn.Parameter(torch.empty(()))
        self._initialise(seed, shape.tied)
        if shape.tied and part.first and part.last:
            self.tie()

    def tie(self) -> None:
        """Head and embedding become one parameter; again after a wrapper has replaced them."""
        self.head.weight = self.tok.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.part.first:
            x = self.tok(x) + self.position
        for block in self.blocks.values():
            x = block(x)
        if self.part.last:
            x = self.head(self.norm(x)) * (1 + self.scale)
        return x

    def _initialise(self, seed: int, tied: bool) -> None:
        """By name, so that a parameter is the same in whichever part and on whichever rank it is."""
        for name, parameter in self.named_parameters():
            source = "tok.weight" if tied and name == "head.weight" else name
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{source}".encode()))
            with torch.no_grad():
                parameter.normal_(0.0, 0.3, generator=generator)
                if "norm" in name and name.endswith("weight"):
                    parameter.add_(1)


def matrices(shape: Shape) -> set[str]:
    """Names of the parameters with two dimensions or more: flattening wrappers hide them."""
    whole = Transformer(shape, Part.whole(shape))
    return {name for name, parameter in whole.named_parameters(remove_duplicate=False) if parameter.ndim >= 2}


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
