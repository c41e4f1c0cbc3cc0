"""Sharded models of wrapper subclasses, for tests.support.parallel.runner."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.two_tensor import TwoTensor

from ckpt import Checkpointer

RUN = "wrapped"


def wrap(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """A wrapper of two tensors."""
    made: torch.Tensor = TwoTensor(first, second)  # type: ignore[no-untyped-call]
    return made


def pair(value: float, *shape: int) -> torch.Tensor:
    """A wrapper; its second tensor is the negative of the first."""
    first = value + torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    return wrap(first, -first)


def model_of_pairs(value: float) -> nn.Module:
    """Parameters of one shape, so that confusing two of them is possible."""
    model = nn.Module()
    for i in range(3):
        model.register_parameter(f"w{i}", nn.Parameter(pair(value + 100 * i, 6, 4)))
    return model


def inner_values(model: nn.Module) -> dict[str, Any]:
    """The inner tensors of the local shards."""
    found = {}
    for name, parameter in model.named_parameters():
        local: Any = parameter._local_tensor if hasattr(parameter, "_local_tensor") else parameter
        found[name] = [getattr(local, inner).tolist() for inner in local.__tensor_flatten__()[0]]
    return found


def step(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    """A step with gradients that differ between parameters."""
    for i, parameter in enumerate(model.parameters()):
        parameter.grad = torch.ones_like(parameter) * (i + 1)
    optim.step()


def two_tensors(store: str) -> dict[str, Any]:
    """Save between steps, restore into a model that made another number of steps, and continue both."""
    mesh, rounds = init_device_mesh("cpu", (2,)), []
    model = model_of_pairs(1.0)
    fully_shard(model, mesh=mesh)
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    with Checkpointer(store, run=RUN) as checkpointer:
        for number in range(3):
            step(model, optim)
            checkpointer.save_async(model, optim, number)
        step(model, optim)
        checkpointer.wait()
        for steps in range(2):
            other = model_of_pairs(7.0)
            fully_shard(other, mesh=mesh)
            other_optim = torch.optim.AdamW(other.parameters(), lr=0.1)
            for _ in range(steps):
                step(other, other_optim)
            checkpointer.restore(other, other_optim, checkpoint=2)
            step(other, other_optim)
            rounds.append(inner_values(other) == inner_values(model))
        names = sorted(checkpointer.load(2, "model/*"))
    return {"alike": rounds, "names": names}


def float8(store: str) -> dict[str, Any]:
    """torchao's float8 all-gather: the local shard is a wrapper, whose cached scale is no state."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp

    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3)))
        convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True))
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(model: Any, optim: torch.optim.Optimizer) -> None:
        step(model, optim)
        precompute_float8_dynamic_scale_for_fsdp(model)

    def weights(model: Any) -> list[Any]:
        return [parameter._local_tensor._tensor.tolist() for parameter in model.parameters()]

    model, optim = make(0)
    with Checkpointer(store, run=RUN) as checkpointer:
        checkpointer.prepare(model, optim)
        for number in range(3):
            checkpointer.save_async(model, optim, number)
            train(model, optim)
        checkpointer.save(model, optim, 3)
        alike, scales = [], []
        for steps in range(2):
            other, other_optim = make(1)
            for _ in range(steps):
                train(other, other_optim)
            checkpointer.restore(other, other_optim)
            locals_: list[Any] = [parameter._local_tensor for parameter in other.parameters()]  # type: ignore[attr-defined]
            scales += [local._precomputed_scale is None for local in locals_]
            alike.append(weights(other) == weights(model))
        entries = sorted(checkpointer.load(3, "model/*"))
    return {"alike": alike, "no stale scales": all(scales), "names": entries}


def scaled(store: str) -> str:
    """A sharded wrapper with an inner tensor of another shape: no placement describes it."""
    from torch.distributed.tensor import DTensor, Shard

    model = nn.Module()
    sharded: Any = nn.Parameter(DTensor.from_local(pair(1.0, 4, 4), init_device_mesh("cpu", (2,)), [Shard(0)]))
    sharded._local_tensor.b = torch.ones(4)
    model.w = sharded
    with Checkpointer(store, run=RUN) as checkpointer:
        try:
            checkpointer.save(model, None, 0)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "saved"
