"""A small GPT on FSDP2 ranks that goes wrong at a known step: a scenario for tests.support.parallel.runner."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ckpt import Checkpointer
from tests.support.parallel.model import Part, Shape, Transformer
from tests.support.training import seed_all

STEPS = (10, 20, 30, 40, 50)
WRONG_AT = 40


def go_wrong(store: str, how: str) -> dict[str, Any]:
    """Train and save; at step WRONG_AT one element of a tensor becomes NaN, or one second moment blows up.

    how: nan, moment, or layer, where one layer alone changes between the last two steps. Returns the names.
    """
    seed_all(0)
    shape = Shape(width=32, hidden=128, vocabulary=101, layers=3)
    model = Transformer(shape, Part.whole(shape))
    for block in model.blocks.values():
        fully_shard(block)
    fully_shard(model, ignored_params={model.scale})
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
    name, parameter = next((n, p) for n, p in model.named_parameters() if n.endswith("1.mlp.up.weight"))
    with Checkpointer(store, run=how, writer="thread", compress="fast") as checkpointer:
        for step in STEPS:
            if how != "layer" or step < STEPS[-1]:
                for p in model.parameters():
                    generator = torch.Generator().manual_seed(step)
                    noise = torch.randn(p.shape, generator=generator)
                    p.grad = _like(p, noise)
                optim.step()
            if how == "layer" and step == STEPS[-1]:
                _local(parameter).add_(0.5)
            if step == WRONG_AT and dist.get_rank() == 1:
                if how == "nan":
                    _local(parameter)[3, 5] = torch.nan
                if how == "moment":
                    _local(optim.state[parameter]["exp_avg_sq"])[2, 1] = 1e12
            checkpointer.save(model, optim, step=step)
            if how == "nan" and step == WRONG_AT and dist.get_rank() == 1:
                _local(parameter)[3, 5] = 0
    return {"name": name}


def _local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.detach()
    return found.to_local() if isinstance(found, DTensor) else found


def _like(parameter: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return values
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(values, parameter.device_mesh, parameter.placements)
