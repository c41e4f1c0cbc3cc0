"""State for tests of torch.distributed.checkpoint, equal in every process that asks for it; saving and loading it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import AdamW, Optimizer

from ckpt.dcp import StorageReader, StorageWriter
from ckptstore.stores import Store
from tests.support.training import seed_all

dcp: Any = torch.distributed.checkpoint  # it exports without saying so


def make_model(seed: int) -> nn.Module:
    """Shapes that two ranks cannot halve evenly, a buffer, and a dimension smaller than the world."""
    seed_all(seed)
    return nn.Sequential(nn.Linear(7, 301), nn.BatchNorm1d(301), nn.Linear(301, 1))


def make_optimizer(model: nn.Module) -> Optimizer:
    optim = AdamW(model.parameters(), lr=0.01)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 0.1 * (number + 1))
    optim.step()
    optim.zero_grad()
    return optim


def flat_optimizer_state(model: nn.Module, optim: Optimizer) -> dict[str, Any]:
    """As DCP's users save it, by parameter name."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return get_optimizer_state_dict(model, optim, options=StateDictOptions(flatten_optimizer_state_dict=True))


def full(value: Any) -> Any:
    from torch.distributed.tensor import DTensor

    if isinstance(value, dict):
        return {key: full(item) for key, item in value.items()}
    return value.full_tensor() if isinstance(value, DTensor) else value


def same(first: Any, second: Any) -> bool:
    """Whether two states are equal, tensors to the bit."""
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    return type(first) is type(second) and bool(first == second)


def save(store: Store | str, state: dict[str, Any], step: int = 1, **options: Any) -> str:
    metadata = dcp.save(state, storage_writer=StorageWriter(store, run="r", step=step), **options)
    assert metadata.storage_meta is not None
    return str(metadata.storage_meta.checkpoint_id)


def load(store: Store | str, state: dict[str, Any], checkpoint: str | int | None = None, **options: Any) -> Any:
    dcp.load(state, storage_reader=StorageReader(store, run="r", checkpoint=checkpoint), **options)
    return state


@contextmanager
def failing(kind: type[BaseException], match: str) -> Iterator[None]:
    """What is done inside fails with this error, wrapped as DCP does."""
    with pytest.raises(CheckpointException, match=match) as caught:
        yield
    assert [type(error) for error, _ in caught.value.failures.values()] == [kind]
