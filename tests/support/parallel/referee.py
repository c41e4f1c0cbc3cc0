"""The independent referee: the whole state of a built layout on rank 0, by torch's own means and any collective."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tests.support.parallel.built import Built, canonical
from tests.support.parallel.zero import ZeroRedundancyOptimizer

State = dict[str, Any]
"""Canonical name -> whole tensor, as an array, which is gathered faster; optimizer state as "name:key"."""


def full_state(built: Built) -> State:
    """On rank 0 the whole state, elsewhere nothing. Tied parameters are there under each of their names.

    Raises AssertionError if ranks that have the same tensor do not have the same bits.
    """
    own = dict(_everything(built))
    if not dist.is_initialized():
        return own
    found: list[State | None] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(own, found)
    state: State = {}
    for part in found or []:
        assert part is not None
        for name, value in part.items():
            assert name not in state or same(state[name], value), f"ranks disagree on {name}"
            state[name] = value
    return state


def same(one: Any, other: Any) -> bool:
    """Bit for bit."""
    if not isinstance(one, np.ndarray) or not isinstance(other, np.ndarray):
        return bool(type(one) is type(other) and one == other)
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def differences(one: State, other: State) -> list[str]:
    """Names that are in one only, or differ in a bit."""
    missing = [f"only in one: {name}" for name in sorted(one.keys() ^ other.keys())]
    return missing + [name for name in sorted(one.keys() & other.keys()) if not same(one[name], other[name])]


def _everything(built: Built) -> Iterator[tuple[str, Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1's own interfaces warn that they are old
        if isinstance(built.chunks[0], FullyShardedDataParallel):
            yield from _fsdp1(built.chunks[0], built.optimizers)
            return
    for chunk in built.chunks:
        yield from _tensors(chunk)
    names = _names(built.chunks)
    for optimizer in built.optimizers:
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            yield from _zero(optimizer, names)
        else:
            for parameter, state in optimizer.state.items():
                yield from _state(names[parameter], state)


def _tensors(chunk: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in chunk.state_dict(keep_vars=True).items():
        yield canonical(name), _whole(value)


def _names(chunks: Iterable[nn.Module]) -> dict[Tensor, list[str]]:
    """All names of each parameter; asked for after state_dict(), which makes FSDP2 shard them again."""
    names: dict[Tensor, list[str]] = {}
    for chunk in chunks:
        for name, parameter in chunk.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(canonical(name))
    return names


def _state(names: list[str], state: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        whole = _whole(value)
        for name in names:
            yield f"{name}:{key}", whole


def _whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().clone().numpy() if isinstance(value, Tensor) else value


def _zero(optimizer: ZeroRedundancyOptimizer, names: dict[Tensor, list[str]]) -> Iterator[tuple[str, Any]]:
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for index, state in optimizer.state_dict()["state"].items():
            yield from _state(names[parameters[index]], state)


def _fsdp1(model: nn.Module, optimizers: Iterable[Optimizer]) -> Iterator[tuple[str, Any]]:
    options = StateDictOptions(full_state_dict=True)  # cpu_offload=True ends in a segmentation fault on the CPU
    for name, value in get_model_state_dict(model, options=options).items():
        yield name, _whole(value)
    aliases = {"tok.weight": ["tok.weight", "head.weight"]} if _tied(model) else {}
    for optimizer in optimizers:
        found: Any = get_optimizer_state_dict(model, optimizer, options=options)["state"]
        for name, state in found.items():
            yield from _state(aliases.get(name, [name]), state)


def _tied(model: nn.Module) -> bool:
    inner = model.module
    return bool(inner.tok.weight is inner.head.weight)  # type: ignore[union-attr]
