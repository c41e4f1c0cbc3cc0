"""Describe: what this rank holds of the state, for the agreement on who writes what. Copies nothing."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from math import prod

import torch
import xxhash

from ckpt.capture import modules
from ckpt.capture.optimizers import NamedOptimizer
from ckpt.capture.ownership import Unit
from ckpt.capture.parameters import Leaf
from ckpt.capture.parts import check_within
from ckpt.capture.tensors import dtype_name, tensor_bytes
from ckpt.capture.train_state import TrainState
from ckpt.capture.wrapped import kind_of

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
    units: dict[str, Unit] = {}
    for item, chunks in state.modules.items():
        trusted = not sampled or all(map(modules.is_replicated, chunks))
        buffers = _storages(buffer for chunk in chunks for buffer in modules.unwrap(chunk).buffers())
        units[item_frame(item)] = _FRAME
        for leaf in state.leaves(item):
            if not isinstance(leaf.value, torch.Tensor):
                units[leaf.unit] = _FRAME
                continue
            if members is not None:
                check_within(leaf.path, leaf.part.cells, members)
            if unit := _unit(leaf, trusted, _storage(leaf.value) in buffers):
                units[leaf.unit] = unit
    for item, named in state.named_optimizers.items():
        units[optimizer_frame(item, state)] = _FRAME
        for optimizer in named:
            units |= _optimizer_units(optimizer, sampled, members)
    return units


def item_frame(item: str) -> str:
    """The unit of a module item itself."""
    return f"{item}#"


def optimizer_frame(item: str, state: TrainState) -> str:
    """The unit of what optimizers keep beside their state. Ranks with other parameters have another one."""
    held = [list(optimizer.leaves) for optimizer in state.named_optimizers[item]]
    return f"{item}#{xxhash.xxh3_64_hexdigest(repr(held).encode())}"


def _optimizer_units(optimizer: NamedOptimizer, sampled: bool, members: AbstractSet[int] | None) -> dict[str, Unit]:
    """Parameters whose state is not kept where they are, or that belong to no module."""
    units = {}
    for leaf in optimizer.leaves.values():
        keeper = optimizer.keeper(leaf)
        if members is not None and keeper is not None:
            check_within(leaf.path, ((keeper,),), members)
        if leaf.unit != leaf.path:
            continue
        if optimizer.holder is not optimizer.optimizer:
            if optimizer.keeps_state_here(leaf):
                units[leaf.unit] = Unit("", (), (), False, leaf.value.nbytes)
        elif unit := _unit(leaf, not sampled, False):
            units[leaf.unit] = unit
    return units


def _unit(leaf: Leaf, trusted: bool, buffer: bool) -> Unit | None:
    """What this rank holds of a tensor; None if nothing."""
    tensor, inner, part = leaf.value, leaf.inner(), leaf.part
    if not part.pieces:
        return None
    wrapped = [unit for one in inner or () if (unit := _unit(one, trusted, buffer))]
    sample = ""
    if not trusted and part.ranks is None:
        sample = " ".join(unit.sample for unit in wrapped) if wrapped else _sample(part.pieces[0].tensor)
    kinds = [dtype_name(leaf.path, tensor)] if inner is None else [kind_of(tensor), *(unit.dtype for unit in wrapped)]
    return Unit(
        dtype=" ".join(kinds),
        shape=part.shape,
        boxes=part.boxes,
        distributed=part.ranks is not None,
        bytes=prod(part.shape) * tensor.element_size(),
        sample=sample,
        buffer=buffer,
    )


def _sample(tensor: torch.Tensor) -> str:
    # A copy: torch refuses to resize a storage once numpy has seen its memory.
    return xxhash.xxh3_64_hexdigest(tensor_bytes(tensor.reshape(-1)[:_SAMPLE].clone().cpu()))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.numel() and type(tensor) is torch.Tensor else 0


def _storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {_storage(tensor) for tensor in tensors} - {0}
