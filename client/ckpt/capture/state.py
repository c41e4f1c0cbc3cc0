"""Capture: everything one save consists of, from the objects of the training loop. Copies nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ckpt.capture import optimizers
from ckpt.capture.describe import item_frame, optimizer_frame, state_unit
from ckpt.capture.leaves import Captured, Change
from ckpt.capture.ownership import Ownership
from ckpt.capture.parts import part_of
from ckpt.capture.tensors import TensorCollector, dtype_name
from ckpt.capture.train_state import GRADIENTS, TrainState
from ckpt.capture.values import capture_values
from ckptstore.errors import InvalidRequest
from ckptstore.format.documents import JSON
from ckptstore.format.trees import mapping


@torch.no_grad()
def capture(state: TrainState, ownership: Ownership, grads: bool) -> Captured:
    """Name every leaf of the state, and what of it this rank writes.

    grads: also capture the gradients, for a save in the middle of an accumulation window; they differ between ranks,
    except those of sharded parameters. Raises UnsupportedObject for what cannot be stored, or LayoutChanged.
    """
    state.reshard()
    collector = capture_objects(state, ownership)
    if grads:
        _capture_gradients(collector, state)
    capture_values(collector, state)
    return collector.captured


def capture_objects(state: TrainState, ownership: Ownership) -> TensorCollector:
    """The state of modules and optimizers."""
    collector, stepped = TensorCollector(ownership), _stepped(state)
    for item in state.modules:
        _capture_module(collector, item, state, stepped)
    for item in state.optimizers:
        _capture_optimizers(collector, item, state, stepped)
    return collector


def _stepped(state: TrainState) -> set[int]:
    """Ids of the parameters that only `optim.step()` changes, as far as Python sees it.

    A step that is captured in a CUDA graph is replayed without it: see `ckpt.snapshot.gate`.
    """
    every = (optimizer for found in state.optimizers.values() for optimizer in found)
    groups = [group for optimizer in every for group in optimizer.param_groups]
    live = state.parameters
    return {id(one) for group in groups for p in group["params"] for one in (p, *live.known_as(p, "").values())}


def _change(value: Any, stepped: set[int]) -> Change:
    if isinstance(value, nn.Parameter) and not value.requires_grad:
        return Change.NEVER
    return Change.STEP if id(value) in stepped else Change.ANY_TIME


def _capture_module(collector: TensorCollector, item: str, state: TrainState, stepped: set[int]) -> None:
    ownership, flats = collector.ownership, state.parameters.flats
    owned: dict[str, JSON] = {}
    for name, value in state.state(item).items():
        unit = f"{item}/{name}"
        tree = collector.shared(unit, unit, value, _change(value, stepped), flats.get(id(value)))
        if ownership.owns(unit):
            owned[name] = tree
    if owned or ownership.owns(item_frame(item)):
        collector.captured.trees[item] = mapping(owned)


def _capture_optimizers(collector: TensorCollector, item: str, state: TrainState, stepped: set[int]) -> None:
    """Several optimizers of one item are joined: each parameter's state, and all groups."""
    ownership, flats = collector.ownership, state.parameters.flats
    frame = optimizer_frame(item, state)
    owned: dict[str, JSON] = {}
    seen: set[str] = set()
    frames = []
    for optimizer in state.optimizers[item]:
        whole = optimizers.optimizer_state(optimizer, state)
        held = optimizers.parameters_by_name(optimizer, state)
        for name, values in whole.pop("state").items():
            if name in seen:
                raise InvalidRequest(
                    f"two optimizers keep state for the parameter {name!r}", "Pass them as a mapping: {name: optimizer}"
                )
            seen.add(name)
            if name in held:
                optimizers.check_sharded_alike(f"{item}/state/{name}", held[name], values)
            unit = state_unit(item, name, optimizer, held[name], state) if name in held else frame
            change = Change.STEP if id(held.get(name)) in stepped else Change.ANY_TIME
            tree = collector.shared(unit, f"{item}/state/{name}", values, change, flats.get(id(held.get(name))))
            if ownership.owns(unit):
                owned[name] = tree
        if ownership.owns(frame):
            frames.append(whole)
    if owned or ownership.owns(frame):
        tree = {"state": mapping(owned), "groups": [], **collector.joined(item, frames)}
        collector.captured.trees[item] = mapping(tree)


def _capture_gradients(collector: TensorCollector, state: TrainState) -> None:
    """Gradients of sharded parameters are sharded alike; all others belong to their rank."""
    owned: dict[str, JSON] = {}
    local = {}
    for name, (parameter, gradient) in state.gradients().items():
        unit, flat = state.parameters.units[id(parameter)], state.parameters.flats.get(id(parameter))
        dtype_name(f"{GRADIENTS}/{name}", gradient)  # a restore makes new gradients, but cannot make wrappers
        if part_of(name, parameter, flat).ranks is None:
            local[name] = gradient
            continue
        tree = collector.shared(unit, f"{GRADIENTS}/{name}", gradient, Change.ANY_TIME, flat)
        if collector.ownership.owns(unit):
            owned[name] = tree
    if owned:
        collector.captured.trees[GRADIENTS] = mapping(owned)
    collector.add_local(GRADIENTS, local)
