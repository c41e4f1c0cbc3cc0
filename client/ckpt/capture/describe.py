"""Describe: what this rank holds of the state, for the agreement on who writes what. Copies nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from math import prod

import torch
import xxhash
from torch.optim import Optimizer

from ckpt.capture import modules, optimizers
from ckpt.capture.ownership import Unit
from ckpt.capture.parts import Flat, TensorPart, check_within, part_of
from ckpt.capture.tensors import dtype_name, tensor_bytes
from ckpt.capture.train_state import TrainState
from ckpt.capture.wrapped import inner_tensors, kind_of

_SAMPLE = 64  # elements of each parameter that are compared between ranks
_FRAME = Unit("", (), (), False, 0)
"""State without tensors of its own: its first holder writes it."""


@torch.no_grad()
def describe(state: TrainState, sampled: bool, members: AbstractSet[int] | None = None) -> dict[str, Unit]:
    """The units that this rank holds, in whole or in part.

    sampled: also digest some values of the units whose placements do not show whether ranks hold copies. members:
    global ranks of the group that saves; None: all ranks. Raises UnsupportedObject for what cannot be stored, or is
    in part with no member.
    """
    state.reshard()
    if members is not None:
        _check_within(state, members)
    units: dict[str, Unit] = {}
    for item, chunks in state.modules.items():
        trusted = not sampled or all(map(modules.is_replicated, chunks))
        buffers = _storages(buffer for chunk in chunks for buffer in modules.unwrap(chunk).buffers())
        units[item_frame(item)] = _FRAME
        for name, value in state.state(item).items():
            path = f"{item}/{name}"
            if not isinstance(value, torch.Tensor):
                units[path] = _FRAME
            elif unit := _unit(path, value, state.parameters.flats.get(id(value)), trusted, _storage(value) in buffers):
                units[path] = unit
    for item in state.optimizers:
        units |= _optimizer_units(item, state, sampled)
    return units


def _check_within(state: TrainState, members: AbstractSet[int]) -> None:
    for item in state.modules:
        for name, value in state.state(item).items():
            if isinstance(value, torch.Tensor):
                part = part_of(f"{item}/{name}", value, state.parameters.flats.get(id(value)))
                check_within(f"{item}/{name}", part.cells, members)
    for item, optimizer in ((item, one) for item, found in state.optimizers.items() for one in found):
        for name, parameter in optimizers.parameters_by_name(optimizer, state).items():
            keeper = optimizers.state_rank(optimizer, parameter)
            check_within(f"{item}/{name}", () if keeper is None else ((keeper,),), members)


def item_frame(item: str) -> str:
    """The unit of a module item itself."""
    return f"{item}#"


def optimizer_frame(item: str, state: TrainState) -> str:
    """The unit of what optimizers keep beside their state. Ranks with other parameters have another one."""
    held = [list(optimizers.parameters_by_name(optimizer, state)) for optimizer in state.optimizers[item]]
    return f"{item}#{xxhash.xxh3_64_hexdigest(repr(held).encode())}"


def state_unit(item: str, name: str, optimizer: Optimizer, parameter: torch.Tensor, state: TrainState) -> str:
    """The unit that an optimizer's state of a parameter belongs to: the parameter's, where it lies with it."""
    own = f"{item}/{name}"
    if optimizers.state_holder(optimizer) is not optimizer:
        return own
    return state.parameters.units.get(id(parameter), own)


def _optimizer_units(item: str, state: TrainState, sampled: bool) -> dict[str, Unit]:
    """The frame; and parameters whose state is not kept where they are, or that belong to no module."""
    units, in_modules = {optimizer_frame(item, state): _FRAME}, state.parameters.units
    for optimizer in state.optimizers[item]:
        for name, parameter in optimizers.parameters_by_name(optimizer, state).items():
            if optimizers.state_holder(optimizer) is not optimizer:
                if optimizers.keeps_state_here(optimizer, parameter):
                    units[f"{item}/{name}"] = Unit("", (), (), False, parameter.nbytes)
            elif id(parameter) not in in_modules and (unit := _unit(name, parameter, None, not sampled, False)):
                units[f"{item}/{name}"] = unit
    return units


def _unit(path: str, tensor: torch.Tensor, flat: Flat | None, trusted: bool, buffer: bool) -> Unit | None:
    """What this rank holds of a tensor; None if nothing."""
    inner = inner_tensors(path, tensor)
    part = part_of(path, tensor, flat)
    if not part.pieces:
        return None
    inner_units = [_unit(f"{path}/{name}", one, None, trusted, buffer) for name, one in (inner or {}).items()]
    wrapped = [unit for unit in inner_units if unit is not None]
    return Unit(
        dtype=dtype_name(path, tensor) if inner is None else " ".join([kind_of(tensor), *(u.dtype for u in wrapped)]),
        shape=part.shape,
        boxes=part.boxes,
        distributed=part.ranks is not None,
        bytes=prod(part.shape) * tensor.element_size(),
        sample="" if trusted or part.ranks is not None else _sample(part, wrapped),
        buffer=buffer,
    )


def _sample(part: TensorPart, inner: Sequence[Unit]) -> str:
    if inner:
        return " ".join(unit.sample for unit in inner)
    # A copy: torch refuses to resize a storage once numpy has seen its memory.
    values = part.pieces[0].tensor.reshape(-1)[:_SAMPLE].clone().cpu()
    return xxhash.xxh3_64_hexdigest(tensor_bytes(values))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.numel() and type(tensor) is torch.Tensor else 0


def _storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {_storage(tensor) for tensor in tensors} - {0}
