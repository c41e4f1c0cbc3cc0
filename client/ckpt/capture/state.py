"""Capture: everything one save consists of, from the objects of the training loop. Copies nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ckpt.capture import optimizers
from ckpt.capture.describe import item_frame, optimizer_frame, state_unit
from ckpt.capture.leaves import Captured, Change, Collector
from ckpt.capture.ownership import Ownership
from ckpt.capture.parameters import Parameters
from ckpt.capture.parts import part_of
from ckpt.capture.rng import rng_state
from ckpt.capture.train_state import GRADIENTS, RNG, Stateful, Subject
from ckptstore.errors import InvalidRequest
from ckptstore.format.documents import JSON
from ckptstore.format.trees import mapping, merge_trees


@torch.no_grad()
def capture(subject: Subject, ownership: Ownership, grads: bool) -> Captured:
    """Name every leaf of the state, and what of it this rank writes.

    grads: take the gradients too, for a save in the middle of an accumulation window; they differ between ranks,
    but for those of sharded parameters. Raises UnsupportedObject for what cannot be stored, LayoutChanged.
    """
    subject.reshard()
    collector = capture_objects(subject, ownership)
    if grads:
        _capture_gradients(collector, ownership, subject, subject.parameters())
    capture_local(collector, subject)
    return collector.captured


def capture_objects(subject: Subject, ownership: Ownership) -> Collector:
    """What modules and optimizers hold."""
    collector, parameters = Collector(ownership), subject.parameters()
    stepped = _stepped((one for found in subject.optimizers.values() for one in found), parameters)
    for item in subject.modules:
        _capture_module(collector, ownership, item, subject, parameters, stepped)
    for item, found in subject.optimizers.items():
        _capture_optimizers(collector, ownership, item, found, parameters, stepped)
    return collector


def capture_local(collector: Collector, subject: Subject) -> None:
    """What belongs to this rank alone."""
    collector.captured.unwritten[RNG] = rng_state()
    for item, value in subject.others.items():
        collector.add_local(item, value.state_dict() if isinstance(value, Stateful) else value)


def _stepped(found: Iterable[Optimizer], known: Parameters) -> set[int]:
    """Ids of the parameters that nothing but `optim.step()` changes, as far as Python sees it.

    A step that is captured in a CUDA graph is replayed without it.
    """
    groups = [group for optimizer in found for group in optimizer.param_groups if not group.get("capturable")]
    return {id(one) for group in groups for p in group["params"] for one in (p, *known.known_as(p, "").values())}


def _change(value: Any, stepped: set[int]) -> Change:
    if isinstance(value, nn.Parameter) and not value.requires_grad:
        return Change.NEVER
    return Change.STEP if id(value) in stepped else Change.ANY_TIME


def _capture_module(
    collector: Collector,
    ownership: Ownership,
    item: str,
    subject: Subject,
    parameters: Parameters,
    stepped: set[int],
) -> None:
    owned: dict[str, JSON] = {}
    for name, value in subject.state(item, parameters).items():
        unit = f"{item}/{name}"
        tree = collector.shared(unit, unit, value, _change(value, stepped), parameters.flats.get(id(value)))
        if ownership.owns(unit):
            owned[name] = tree
    if owned or ownership.owns(item_frame(item)):
        collector.captured.trees[item] = mapping(owned)


def _capture_optimizers(
    collector: Collector,
    ownership: Ownership,
    item: str,
    found: Sequence[Optimizer],
    parameters: Parameters,
    stepped: set[int],
) -> None:
    """Several optimizers of one item are joined: each parameter's state, and all groups."""
    frame = optimizer_frame(item, found, parameters)
    owned: dict[str, JSON] = {}
    seen: set[str] = set()
    frames: JSON = {}
    for optimizer in found:
        state = optimizers.optimizer_state(optimizer, parameters)
        held = optimizers.parameters_by_name(optimizer, parameters)
        for name, values in state.pop("state").items():
            if name in seen:
                raise InvalidRequest(
                    f"two optimizers keep state for the parameter {name!r}", "Pass them as a mapping: {name: optimizer}"
                )
            seen.add(name)
            if name in held:
                optimizers.check_sharded_alike(f"{item}/state/{name}", held[name], values)
            unit = state_unit(item, name, optimizer, held[name], parameters) if name in held else frame
            flat = parameters.flats.get(id(held.get(name)))
            change = Change.STEP if id(held.get(name)) in stepped else Change.ANY_TIME
            tree = collector.shared(unit, f"{item}/state/{name}", values, change, flat)
            if ownership.owns(unit):
                owned[name] = tree
        if ownership.owns(frame):
            frames = merge_trees(frames, collector.inline(item, state), item)
    if owned or ownership.owns(frame):
        collector.captured.trees[item] = mapping({"state": mapping(owned), **({"groups": []} | frames)})


def _capture_gradients(collector: Collector, ownership: Ownership, subject: Subject, parameters: Parameters) -> None:
    """Gradients of sharded parameters are sharded alike; all others belong to their rank."""
    owned: dict[str, JSON] = {}
    local = {}
    for name, (parameter, gradient) in subject.gradients(parameters).items():
        unit, flat = parameters.units[id(parameter)], parameters.flats.get(id(parameter))
        if part_of(name, parameter, flat).ranks is None:
            local[name] = gradient
            continue
        tree = collector.shared(unit, f"{GRADIENTS}/{name}", gradient, Change.ANY_TIME, flat)
        if ownership.owns(unit):
            owned[name] = tree
    if owned:
        collector.captured.trees[GRADIENTS] = mapping(owned)
    collector.add_local(GRADIENTS, local)
