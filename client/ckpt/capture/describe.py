"""Describe: what this rank holds of the state, for the agreement on who writes what, and what it will stage.

Copies nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set as AbstractSet
from math import prod
from typing import Any

import torch
import xxhash
from msgspec.structs import replace
from torch.optim import Optimizer

from ckpt.capture import modules
from ckpt.capture.optimizers import NamedOptimizer
from ckpt.capture.ownership import DIFFERS, Ownership, Unit, Units
from ckpt.capture.parameters import Leaf
from ckpt.capture.parts import check_within, kind_of
from ckpt.capture.tensors import digest, dtype_name, first_elements
from ckpt.capture.train_state import TrainState
from ckptstore.format import boxes

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
        wrappers = {modules.unwrap(chunk): chunk for chunk in chunks}
        for inner in wrappers:
            modules.own_loading(inner)  # refuses code that a restore could not run
        units[item_frame(item)] = _FRAME
        for leaf in state.leaves(item):
            if not isinstance(leaf.value, torch.Tensor):
                units[leaf.unit] = _FRAME
                continue
            buffer = id(leaf.value) not in state.parameters.leaves
            assert leaf.module is not None
            trusted = not sampled or modules.is_replicated(wrappers[leaf.module], leaf.raw, buffer)
            if unit := _unit(leaf, trusted, buffer):
                own = buffer and not trusted and leaf.raw.endswith(modules.STATISTICS)
                units[leaf.unit] = replace(unit, sample=DIFFERS) if own else unit
            if members is not None:
                check_within(leaf.path, leaf.part.cells, members)
    kept: dict[str, list[str]] = defaultdict(list)
    for item, named in state.named_optimizers.items():
        units[optimizer_frame(item, state)] = _FRAME
        for optimizer in named:
            units |= _optimizer_units(optimizer, units, sampled, members)
            for leaf in optimizer.leaves.values():
                kept[leaf.unit].append(item)
    return {name: replace(unit, optimizers=tuple(kept[name])) if name in kept else unit for name, unit in units.items()}


def item_frame(item: str) -> str:
    """The unit of a module item itself."""
    return f"{item}#"


def optimizer_frame(item: str, state: TrainState) -> str:
    """The unit of what optimizers keep beside their state. Ranks with other parameters have another one."""
    held = [list(optimizer.leaves) for optimizer in state.named_optimizers[item]]
    return f"{item}#{xxhash.xxh3_64_hexdigest(repr(held).encode())}"


def _optimizer_units(
    optimizer: NamedOptimizer, known: Units, sampled: bool, members: AbstractSet[int] | None
) -> dict[str, Unit]:
    """Parameters whose state is not kept where they are, or that no `state_dict` of a module has under their name."""
    units = {}
    for leaf in optimizer.leaves.values():
        if members is not None:
            check_within(leaf.path, optimizer.keepers(leaf), members)
        if leaf.unit in known:
            continue
        if optimizer.holder is not optimizer.optimizer:
            if optimizer.keeps_state_here(leaf):
                units[leaf.unit] = replace(_FRAME, bytes=leaf.value.nbytes)
        elif unit := _unit(leaf, not sampled, False):
            units[leaf.unit] = unit
    return units


def _unit(leaf: Leaf, trusted: bool, buffer: bool) -> Unit | None:
    """The part of a tensor that this rank holds; None if none."""
    tensor, inner = leaf.value, leaf.inner()
    kind = dtype_name(leaf.path, tensor) if inner is None else kind_of(tensor)
    part = leaf.part
    if not part.pieces:
        return None
    wrapped = [unit for one in inner or () if (unit := _unit(one, trusted, buffer))]
    sample = ""
    if not trusted and part.ranks is None:
        sample = " ".join(unit.sample for unit in wrapped) if wrapped else digest(first_elements(part.pieces[0].tensor))
    return Unit(
        dtype=" ".join((kind, *(unit.dtype for unit in wrapped))),
        shape=part.shape,
        boxes=part.boxes,
        distributed=part.ranks is not None,
        bytes=prod(part.shape) * tensor.element_size(),
        sample=sample,
        buffer=buffer,
    )


_NOT_HERE = {"capturable": False, "fused": None, "foreign": False, "differentiable": False}
"""Options that a step on the CPU does without."""


def bytes_to_come(state: TrainState, ownership: Ownership) -> int:
    """The bytes of the state that the next steps of torch's own optimizers make, and this rank will stage.

    State that optimizers of other kinds are still to make is not in it.
    """
    measured: dict[tuple[int, torch.dtype, int], tuple[int, int]] = {}
    total = 0
    for optimizer in (one for named in state.named_optimizers.values() for one in named):
        pairs = zip(optimizer.optimizer.param_groups, optimizer.groups, strict=True)
        for group, leaf in ((group, leaf) for group, held in pairs for one in held for leaf in one):
            parameter = leaf.value
            if not parameter.requires_grad or not optimizer.keeps_state_here(leaf) or optimizer.live_state(leaf):
                continue
            key = (id(group), parameter.dtype, min(parameter.dim(), 2))
            if key not in measured:
                measured[key] = measure_state(optimizer.holder, group, parameter.dtype, key[2])
            (per_element, extra), part = measured[key], leaf.part
            total += extra
            if ownership.writes(ownership.state_unit(leaf.unit, optimizer.item), part.ranks, part.holders):
                total += per_element * sum(prod(boxes.sizes(box)) for box in part.boxes)
    return total


def measure_state(
    optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype = torch.float32, dimensions: int = 2
) -> tuple[int, int]:
    """The bytes that such an optimizer keeps for each element of such a parameter and a constant: measured by a step of
    another on a tiny parameter."""
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim."):
        return 0, 0  # its step may have side effects
    tiny = torch.nn.Parameter(torch.zeros((3, 5)[2 - dimensions :], dtype=dtype))
    tiny.grad = torch.zeros_like(tiny)
    options = {
        name: 1.0 if isinstance(value, torch.Tensor) else _NOT_HERE.get(name, value)
        for name, value in group.items()
        if name != "param_names"
    }
    try:
        other = kind([{**options, "params": [tiny]}])  # type: ignore[call-arg]
        other.step()
    except Exception:
        return 0, 0  # one that needs a closure, or sparse gradients
    found = [value for value in other.state.get(tiny, {}).values() if isinstance(value, torch.Tensor)]
    per_element = sum(value.element_size() for value in found if value.shape == tiny.shape)
    return per_element, sum(value.nbytes for value in found if value.shape != tiny.shape)
