"""Estimate of the bytes that a save stages, before the first save. Does not copy, and is not a collective."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.optim import Optimizer

from ckpt.capture.leaves import Captured
from ckpt.capture.optimizers import NamedOptimizer
from ckpt.capture.ownership import Ownership
from ckpt.capture.train_state import TrainState
from ckptstore.format import boxes

_NOT_HERE = {"capturable": False, "fused": None, "foreign": False, "differentiable": False}
"""Options that a rehearsal on the CPU does without."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """What an optimizer keeps for a parameter."""

    per_element: int = 0
    besides: int = 0


def estimate_snapshot_bytes(captured: Captured, state: TrainState, ownership: Ownership) -> int:
    """What this rank will stage once every optimizer has made a step, if it has captured so much now: modules, and
    state of torch's own optimizers.

    What optimizers of other kinds are still to make is not in it.
    """
    named = (optimizer for found in state.named_optimizers.values() for optimizer in found)
    to_come = sum(_bytes_to_come(optimizer, ownership) for optimizer in named)
    return sum(piece.bytes for piece in captured.leaves.slices) + to_come


def _bytes_to_come(optimizer: NamedOptimizer, ownership: Ownership) -> int:
    """Of the state that the next step makes here."""
    rehearsed: dict[tuple[int, torch.dtype, int], _Kept] = {}
    pairs = zip(optimizer.optimizer.param_groups, optimizer.groups, strict=True)
    total = 0
    for group, leaf in ((group, leaf) for group, held in pairs for one in held for leaf in one):
        parameter = leaf.value
        if not parameter.requires_grad or not optimizer.keeps_state_here(leaf) or optimizer.live_state(leaf):
            continue
        key = (id(group), parameter.dtype, min(parameter.dim(), 2))
        if key not in rehearsed:
            rehearsed[key] = _rehearse(optimizer.holder, group, parameter.dtype, key[2])
        kept, part = rehearsed[key], leaf.part
        total += kept.besides
        if ownership.writes(leaf.unit, part):
            total += kept.per_element * sum(prod(boxes.sizes(box)) for box in part.boxes)
    return total


def _rehearse(optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype, dimensions: int) -> _Kept:
    """The state such an optimizer keeps for such a parameter, measured by a step of another on a tiny parameter."""
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim."):
        return _Kept()  # its step may have side effects
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
        return _Kept()  # one that needs a closure, or sparse gradients
    found = [value for value in other.state.get(tiny, {}).values() if isinstance(value, torch.Tensor)]
    whole = [value for value in found if value.shape == tiny.shape]
    return _Kept(
        sum(value.element_size() for value in whole), sum(value.nbytes for value in found if value.shape != tiny.shape)
    )
