"""Layouts in which layers are divided: pipeline stages over ranks, or chunks of a model in one process."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from tests.support.parallel.built import SEQUENCES, Built, Setup, batch, cross_entropy, finish_step, optimizers
from tests.support.parallel.model import TOKENS, Part, Shape, Transformer

MICROBATCHES = 2


def pp(setup: Setup) -> Built:
    """One stage per rank."""
    return _pipeline(setup, stages=2)


def pp_interleaved(setup: Setup) -> Built:
    """Two stages per rank: each rank has a list of chunks."""
    return _pipeline(setup, stages=4)


def model_parallel(setup: Setup) -> Built:
    """Two chunks in one process, as on two devices."""
    return _pipeline(setup, stages=2)


def _pipeline(setup: Setup, stages: int) -> Built:
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    parts = _parts(setup.shape, stages)
    own = {index: Transformer(setup.shape, parts[index], setup.seed) for index in range(rank, stages, world)}
    if setup.shape.tied and world == 1:
        own[stages - 1].head.weight = own[0].tok.weight
    schedule = _Schedule(setup.shape, own, stages, world)
    found = optimizers(setup, own.values())
    return Built(list(own.values()), found, lambda step: schedule.train(step, found))


def _parts(shape: Shape, stages: int) -> list[Part]:
    each = -(-shape.layers // stages)
    blocks = [tuple(range(shape.layers)[each * stage : each * (stage + 1)]) for stage in range(stages)]
    experts = tuple(range(shape.experts))
    return [Part(own, stage == 0, stage == stages - 1, experts) for stage, own in enumerate(blocks)]


class _Schedule:
    """GPipe: all microbatches forward, then all backward. Stage s is on rank s modulo the world size."""

    def __init__(self, shape: Shape, own: Mapping[int, Transformer], stages: int, world: int) -> None:
        self._shape = shape
        self._own = own
        self._last = stages - 1
        self._world = world
        self._here: dict[tuple[int, int], Tensor] = {}

    def train(self, step: int, optimizers: list[Optimizer]) -> float:
        """One step; returns the loss, which the last stage sends to the others."""
        tokens, targets = batch(self._shape, step)
        total = torch.zeros(())
        passed = []
        micro = zip(tokens.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True)
        for index, (some, wanted) in enumerate(micro):
            for stage, chunk in self._own.items():
                chunk.train(index == 0)  # statistics move once a step, as in the other layouts
                given = some if stage == 0 else self._receive(stage - 1, stage).requires_grad_()
                result = chunk(given)
                if stage == self._last:
                    result = cross_entropy(result, wanted) / MICROBATCHES
                    total += result.detach()
                else:
                    self._send(result.detach(), stage, stage + 1)
                passed.append((stage, given, result))
        self._backward(passed)
        finish_step(optimizers)
        if self._world > 1:
            dist.broadcast(total, self._last % self._world)
        return float(total)

    def _backward(self, passed: list[tuple[int, Tensor, Tensor]]) -> None:
        for stage, given, result in reversed(passed):
            torch.autograd.backward(result, None if stage == self._last else self._receive(stage + 1, stage))
            if stage > 0:
                assert given.grad is not None
                self._send(given.grad, stage, stage - 1)
        if self._shape.tied and self._world > 1:
            self._sum_tied()

    def _sum_tied(self) -> None:
        """Embedding and head are one parameter with a copy in the first and in the last stage."""
        assert self._world == 2, "first and last stage are the whole group"
        for stage, chunk in self._own.items():
            if stage in (0, self._last):
                copy = (chunk.tok if stage == 0 else chunk.head).weight
                assert isinstance(copy.grad, Tensor)
                dist.all_reduce(copy.grad)

    def _send(self, x: Tensor, source: int, target: int) -> None:
        if self._world == 1:
            self._here[source, target] = x
        else:
            dist.send(x.contiguous(), target % self._world)

    def _receive(self, source: int, target: int) -> Tensor:
        if self._world == 1:
            return self._here.pop((source, target))
        x = torch.empty(SEQUENCES // MICROBATCHES, TOKENS, self._shape.width)
        dist.recv(x, source % self._world)
        return x
