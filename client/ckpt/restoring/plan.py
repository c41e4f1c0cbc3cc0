"""Plan: fit a checkpoint to the objects that want it, entry by entry. Changes nothing live.

What must be done after all bytes are placed is collected as `finish`, to be run in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ckpt.capture.modules import EXTRA_STATE, canonical, unwrap
from ckpt.capture.optimizers import load_optimizer_state, parameters_by_name
from ckpt.capture.rng import load_rng_state
from ckpt.capture.state import GRADIENTS, RNG, Stateful, Subject
from ckpt.restoring.destinations import Destinations
from ckptstore.documents import JSON, Content
from ckptstore.errors import CorruptObject, StateMismatch
from ckptstore.trees import TAG

_SHOWN = 8


@dataclass(slots=True)
class RestorePlan:
    """What goes where, what does not fit, and what to do at the end."""

    destinations: Destinations
    finish: list[Callable[[], object]] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    """Wanted and not in the checkpoint."""
    unexpected: list[str] = field(default_factory=list)
    """In the checkpoint's part that was wanted, and without a place."""
    mismatched: list[str] = field(default_factory=list)
    """Of another shape (left as it was) or type (cast)."""
    unused: list[str] = field(default_factory=list)
    """Items of the checkpoint that nobody asked for."""


def plan_restore(content: Content, local: Mapping[str, JSON], subject: Subject, strict: bool) -> RestorePlan:
    """The plan for one rank. local: the rank's own items, without those that must not be used.

    Raises StateMismatch if strict and anything does not fit.
    """
    plan = RestorePlan(Destinations(content))
    trees = {**content.trees, **local}
    names = subject.parameter_names()
    for item, module in subject.modules.items():
        if _has(plan, trees, item):
            _plan_module(plan, item, module, trees[item])
    for item, optimizer in subject.optimizers.items():
        if _has(plan, trees, item):
            _plan_optimizer(plan, item, optimizer, trees[item], names)
    for item, value in subject.others.items():
        if _has(plan, trees, item):
            _plan_extra(plan, item, value, trees[item])
    if GRADIENTS in trees and subject.model is not None:
        _plan_gradients(plan, subject.model, trees[GRADIENTS])
    if RNG in trees:
        plan.finish.append(partial(load_rng_state, plan.destinations.decode(trees[RNG], RNG)))
    wanted = {*subject.modules, *subject.optimizers, *subject.others, GRADIENTS, RNG}
    plan.unused = sorted(trees.keys() - wanted)
    if strict:
        _require_fit(plan, trees)
    return plan


def _has(plan: RestorePlan, trees: Mapping[str, JSON], item: str) -> bool:
    if item not in trees:
        plan.missing.append(item)
    return item in trees


def _plan_module(plan: RestorePlan, item: str, module: nn.Module, tree: JSON) -> None:
    inner = unwrap(module)
    live = {tensor.data_ptr() for tensor in (*inner.parameters(), *inner.buffers())}
    detached: dict[str, torch.Tensor] = {}
    saved = dict(_mapping(tree, item))
    for raw, target in inner.state_dict().items():
        name, leaf = canonical(raw), saved.pop(canonical(raw), None)
        if leaf is None:
            plan.missing.append(f"{item}/{name}")
        elif raw.rpartition(".")[2] == EXTRA_STATE:
            owner = inner.get_submodule(raw.rpartition(".")[0])
            plan.finish.append(partial(owner.set_extra_state, plan.destinations.decode(leaf, f"{item}/{name}")))
        elif _fits(plan, f"{item}/{name}", leaf, target):
            plan.destinations.fill(leaf["name"], target)
            if target.data_ptr() not in live:
                detached[raw] = target
    plan.unexpected += [f"{item}/{name}" for name in saved]
    if detached:
        # A hook made these for state_dict; only load_state_dict knows where they belong.
        plan.finish.append(partial(inner.load_state_dict, detached, strict=False))


def _plan_optimizer(plan: RestorePlan, item: str, optimizer: Optimizer, tree: JSON, names: Mapping[int, str]) -> None:
    parameters = parameters_by_name(optimizer, names)
    named: dict[str, Any] = {
        key: plan.destinations.decode(value, f"{item}/{key}") for key, value in _mapping(tree, item) if key != "state"
    }
    held = {name for group in named["groups"] for name in group["params"]}
    plan.missing += [f"{item}/{name}" for name in parameters.keys() - held]
    gone = held - parameters.keys()
    plan.unexpected += [f"{item}/{name}" for name in sorted(gone)]
    named["state"] = {
        name: _decode_state(plan, f"{item}/state/{name}", state, optimizer, parameters.get(name))
        for name, state in _mapping(dict(_mapping(tree, item))["state"], item)
        if name not in gone
    }
    plan.finish.append(partial(load_optimizer_state, optimizer, named, names))


def _decode_state(
    plan: RestorePlan, path: str, tree: JSON, optimizer: Optimizer, parameter: torch.Tensor | None
) -> Any:
    """The state of one parameter; tensors the optimizer already has are filled in place."""
    if parameter is None or not isinstance(tree, dict) or TAG in tree:
        return plan.destinations.decode(tree, path)
    live = optimizer.state.get(parameter, {})
    state: dict[str, Any] = {}
    for key, leaf in tree.items():
        target = live.get(key)
        is_entry = isinstance(leaf, dict) and leaf.get(TAG) == "tensor" and "name" in leaf
        if is_entry and isinstance(target, torch.Tensor) and _same(plan, leaf["name"], target):
            plan.destinations.fill(leaf["name"], target)
            state[key] = target
        else:
            state[key] = plan.destinations.decode(leaf, f"{path}/{key}", parameter.device)
    return state


def _plan_extra(plan: RestorePlan, item: str, value: Any, tree: JSON) -> None:
    decoded = plan.destinations.decode(tree, item)
    if isinstance(value, Stateful):
        plan.finish.append(partial(value.load_state_dict, decoded))
    else:
        plan.values[item] = decoded


def _plan_gradients(plan: RestorePlan, model: nn.Module, tree: JSON) -> None:
    parameters = {canonical(name): parameter for name, parameter in unwrap(model).named_parameters()}
    for name, leaf in _mapping(tree, GRADIENTS):
        parameter = parameters.get(name)
        if parameter is None:
            plan.unexpected.append(f"{GRADIENTS}/{name}")
        else:
            gradient = plan.destinations.decode(leaf, f"{GRADIENTS}/{name}", parameter.device)
            plan.finish.append(partial(setattr, parameter, "grad", gradient))


def _mapping(tree: JSON, path: str) -> list[tuple[str, JSON]]:
    """The items of a tree that is a dict, however its keys made it be written."""
    if isinstance(tree, dict):
        if TAG not in tree:
            return list(tree.items())
        if tree[TAG] in ("dict", "odict"):
            return [(key, value) for key, value in tree["v"]]
    raise CorruptObject(f"the tree of {path!r} is not a dict")


def _fits(plan: RestorePlan, name: str, leaf: JSON, target: Any) -> bool:
    if not (isinstance(leaf, dict) and leaf.get(TAG) == "tensor" and isinstance(target, torch.Tensor)):
        plan.mismatched.append(f"{name}: a tensor on one side only")
        return False
    dtype, shape = plan.destinations.describe(leaf["name"])
    if tuple(target.shape) != shape:
        plan.mismatched.append(f"{name}: {list(shape)} in the checkpoint, {list(target.shape)} here")
        return False
    if target.dtype != dtype:
        plan.mismatched.append(f"{name}: {dtype} in the checkpoint, {target.dtype} here")
    return True


def _same(plan: RestorePlan, entry: str, target: torch.Tensor) -> bool:
    return plan.destinations.describe(entry) == (target.dtype, tuple(target.shape))


def _require_fit(plan: RestorePlan, trees: Mapping[str, JSON]) -> None:
    problems = [
        f"{what} {', '.join(found[:_SHOWN])}" + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
        for what, found in (
            ("not in the checkpoint:", plan.missing),
            ("only in the checkpoint:", plan.unexpected),
            ("different:", plan.mismatched),
        )
        if found
    ]
    if problems:
        raise StateMismatch(
            f"the checkpoint does not fit: {'; '.join(problems)}",
            f"It holds {', '.join(sorted(trees))}. Build the objects as they were saved, or pass strict=False to "
            "restore what fits; nothing was changed",
        )
