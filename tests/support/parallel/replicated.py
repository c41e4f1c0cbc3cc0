"""Layouts in which every rank has the whole model, or all of it but the others' experts."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tests.support.parallel.built import Built, Setup, average_gradients, data_parallel, optimizers
from tests.support.parallel.model import Experts, Part, Transformer
from tests.support.parallel.zero import ZeroRedundancyOptimizer


def single(setup: Setup) -> Built:
    """One process, no process group needed."""
    model = setup.model()
    return data_parallel(setup, model, optimizers(setup, [model]))


def ddp(setup: Setup) -> Built:
    model = DistributedDataParallel(setup.model())
    return data_parallel(setup, model, optimizers(setup, [model]), dist.get_rank(), dist.get_world_size())


def zero(setup: Setup) -> Built:
    """DistributedDataParallel whose optimizer state is divided over the ranks, parameter by parameter."""
    model = DistributedDataParallel(setup.model())

    def make(parameters: list[Tensor], kind: Any, **options: Any) -> Optimizer:
        return ZeroRedundancyOptimizer(parameters, kind, **options)

    return data_parallel(setup, model, optimizers(setup, [model], make), dist.get_rank(), dist.get_world_size())


def zero_by_hand(setup: Setup) -> Built:
    """The same without ZeroRedundancyOptimizer: an optimizer of the rank's own parameters, which are then broadcast."""
    model = DistributedDataParallel(setup.model())
    rank, world = dist.get_rank(), dist.get_world_size()
    every = list(model.parameters())

    def make(parameters: list[Tensor], kind: Any, **options: Any) -> Optimizer:
        own = set(every[rank::world])
        optimizer: Optimizer = kind([parameter for parameter in parameters if parameter in own], **options)
        optimizer.register_step_post_hook(lambda *_: share())
        return optimizer

    def share() -> None:
        for index, parameter in enumerate(every):
            dist.broadcast(parameter.data, index % world)
            parameter.grad = None

    return data_parallel(setup, model, optimizers(setup, [model], make), rank, world)


def expert_parallel(setup: Setup) -> Built:
    """Each rank has its own experts, under their global numbers; the rest is replicated."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shape = setup.shape
    assert shape.experts >= world, "this layout needs a shape with experts"
    own = Part(tuple(range(shape.layers)), first=True, last=True, experts=tuple(range(rank, shape.experts, world)))
    model = Transformer(shape, own, setup.seed)
    for module in model.modules():
        if isinstance(module, Experts):
            module.exchange = True

    def reduce() -> None:
        """Experts have seen the tokens of all ranks already, and lack only the division."""
        experts = [parameter for name, parameter in model.named_parameters() if ".experts." in name]
        average_gradients([p for name, p in model.named_parameters() if ".experts." not in name], world)
        for parameter in experts:
            assert parameter.grad is not None
            parameter.grad /= world

    return data_parallel(setup, model, optimizers(setup, [model]), rank, world, reduce=reduce)
