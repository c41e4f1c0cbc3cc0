"""Plan the restore of modules and optimizers: match their tensors with the entries of a checkpoint."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ckpt.capture.modules import EXTRA_STATE, canonical, named_parameters, raw_state, unwrap
from ckpt.capture.optimizers import (
    check_groups,
    keeps_state_here,
    live_state,
    load_optimizer_state,
    other_classes,
    parameters_by_name,
    state_holder,
)
from ckpt.capture.parts import Flat, TensorPart, part_of
from ckpt.capture.train_state import GRADIENTS, MODEL, TrainState
from ckpt.capture.wrapped import drop_cached, inner_tensors, is_plain_type, kind_of, memory_address
from ckpt.restoring.destinations import Destinations
from ckpt.restoring.plan import RestorePlan
from ckptstore.errors import CorruptObject, StateMismatch
from ckptstore.format.documents import JSON
from ckptstore.format.trees import TAG


def plan_objects(plan: RestorePlan, trees: Mapping[str, JSON], state: TrainState) -> None:
    """Add the modules and optimizers of a state, and the gradients of the model, to the plan."""
    state.reshard()
    for item in state.to_place():
        if plan.has(trees, item):
            _plan_modules(plan, item, state, trees[item])
    saved, live = _saved_ties(state, trees), cache(lambda: ties(state.all_names()))
    for item in state.optimizers:
        if plan.has(trees, item):
            _plan_optimizers(plan, item, state, trees[item], (saved, live))
    if GRADIENTS in trees and MODEL in state.modules:
        _plan_gradients(plan, state, trees[GRADIENTS])


def _plan_modules(plan: RestorePlan, item: str, state: TrainState, tree: JSON) -> None:
    saved, found, known = dict(_mapping(tree, item)), set(), state.parameters
    for chunk in state.modules[item]:
        inner = unwrap(chunk)
        live = cache(partial(_addresses, inner, state))
        detached: dict[str, torch.Tensor] = {}
        for raw, target in raw_state(chunk, known).items():
            name = canonical(raw)
            found.add(name)
            leaf = saved.get(name)
            if leaf is None:
                plan.missing.append(f"{item}/{name}")
            elif raw.rpartition(".")[2] == EXTRA_STATE:
                owner = inner.get_submodule(raw.rpartition(".")[0])
                plan.finish.append(partial(owner.set_extra_state, plan.destinations.decode(leaf, f"{item}/{name}")))
            elif _fill(plan, f"{item}/{name}", leaf, target, known.flats.get(id(target))):
                plan.overwritten.add(f"{item}/{name}")
                if id(target) not in known.names and memory_address(target) not in live():
                    detached[raw] = target
        if detached:
            # A hook created these for state_dict; only load_state_dict can put them back.
            plan.finish.append(partial(inner.load_state_dict, detached, strict=False))
    plan.unexpected += [f"{item}/{name}" for name in saved if name not in found]


def _addresses(module: nn.Module, state: TrainState) -> set[int]:
    """The addresses of a module's tensors."""
    views = (view for pack in state.parameters.packs.values() for view in pack.views.values())
    return {memory_address(tensor) for tensor in (*module.parameters(), *module.buffers(), *views)}


def _plan_optimizers(
    plan: RestorePlan,
    item: str,
    state: TrainState,
    tree: JSON,
    tied: tuple[Ties, Callable[[], Ties]],
) -> None:
    """tied: ties of the checkpoint, and of the live parameters; the latter are rarely needed, so computed on demand."""
    saved, optimizers = dict(_mapping(tree, item)), state.optimizers[item]
    alone = len(optimizers) == 1
    if not {"state", "groups"} <= saved.keys():
        raise StateMismatch(
            f"the item {item!r} of the checkpoint holds {', '.join(saved) or 'nothing'}, not an optimizer's state",
            "Restore without the optimizer; ckpt.load reads the tensors",
        )
    states = dict(_mapping(saved.pop("state"), item))
    if any(state_holder(optimizer).state for optimizer in optimizers):
        plan.overwritten.add(item)
    frame = {key: plan.destinations.decode(value, f"{item}/{key}") for key, value in saved.items()}
    give_to_all(tied[0], states, frame["groups"])
    held = {name for group in frame["groups"] for name in group["params"]}
    live = [parameters_by_name(optimizer, state) for optimizer in optimizers]
    everything = {name: parameter for named in live for name, parameter in named.items()}
    plan.missing += [f"{item}/{name}" for name in everything.keys() - held]
    if left_over := held - everything.keys():
        plan.unexpected += [f"{item}/{name}" for name in without_further_names(left_over, tied[1](), everything)]
    on_device = [group for group in frame["groups"] if group.get("fused") or group.get("capturable")]
    steps_on_device = {name for group in on_device for name in group["params"]}
    for optimizer, parameters in zip(optimizers, live, strict=True):
        _compare_groups(plan, item, optimizer, frame["groups"], state)
        here = {name for name, parameter in parameters.items() if keeps_state_here(optimizer, parameter)}
        # State without a parameter belongs to the whole optimizer.
        here |= states.keys() - held if alone else set()
        named = {
            name: _decode_state(
                plan,
                f"{item}/state/{name}",
                states[name],
                (optimizer, parameters.get(name)),
                state,
                name in steps_on_device,
            )
            for name in states
            if name in here and id(parameters.get(name)) not in plan.resized
        }
        plan.finish.append(partial(load_optimizer_state, optimizer, {"state": named, **frame}, state, alone))


def _compare_groups(
    plan: RestorePlan, item: str, optimizer: Optimizer, saved: list[dict[str, Any]], state: TrainState
) -> None:
    """Record saved parameter groups of another optimizer class, or without the options of a live group."""
    if kinds := other_classes(optimizer, parameters_by_name(optimizer, state), saved):
        here = type(state_holder(optimizer)).__name__
        plan.mismatched.append(f"{item}: state of {', '.join(kinds)} in the checkpoint, {here} here")
    try:
        check_groups(optimizer, saved, state)
    except StateMismatch as error:
        plan.refused = plan.refused or error


def _decode_state(
    plan: RestorePlan,
    path: str,
    tree: JSON,
    owner: tuple[Optimizer, torch.Tensor | None],
    train_state: TrainState,
    step_on_device: bool,
) -> Any:
    """The state of one parameter; tensors the optimizer already has are filled in place.

    step_on_device: `step` belongs on the parameter's device, where `fused` and `capturable` need it; otherwise where it
    was saved. Optimizer.load_state_dict does the same.
    """
    optimizer, parameter = owner
    if parameter is None or not isinstance(tree, dict) or TAG in tree:
        return plan.destinations.decode(tree, path)
    live, flat = live_state(optimizer, parameter, train_state), train_state.parameters.flats.get(id(parameter))
    state: dict[str, Any] = {}
    for key, leaf in tree.items():
        target = live.get(key)
        is_entry = isinstance(leaf, dict) and leaf.get(TAG) == "tensor" and "name" in leaf
        if (wrapper := _wrapper_for(leaf, target, parameter)) is not None:
            _fill(plan, f"{path}/{key}", leaf, wrapper, None)
            state[key] = wrapper
            continue
        if not is_entry:
            state[key] = plan.destinations.decode(leaf, f"{path}/{key}", parameter.device)
            continue
        moves = "device" in leaf or (key == "step" and step_on_device)
        device = parameter.device if moves else torch.device("cpu")
        fits = target if isinstance(target, torch.Tensor) and (key != "step" or target.device == device) else None
        if fits is not None and (part := _same(plan, leaf["name"], fits, flat)):
            _tensors(plan).fill(leaf["name"], part)
            state[key] = fits
        else:
            state[key] = _tensors(plan).new_beside(leaf["name"], parameter, flat, device)
    return state


def _saved_ties(state: TrainState, trees: Mapping[str, JSON]) -> Ties:
    """Names of the checkpoint's parameters that share one entry."""
    return ties(
        (state.prefix(item) + name, entry)
        for item in state.modules
        if item in trees
        for name, leaf in _mapping(trees[item], item)
        if (entry := _first_entry(leaf)) is not None
    )


def _first_entry(leaf: JSON) -> str | None:
    """The entry of a tensor, or the first one of a wrapper."""
    while isinstance(leaf, dict) and leaf and TAG not in leaf:
        leaf = next(iter(leaf.values()))
    return leaf.get("name") if isinstance(leaf, dict) else None


def _plan_gradients(plan: RestorePlan, state: TrainState, tree: JSON) -> None:
    named = (named_parameters(chunk, state.parameters) for chunk in state.modules[MODEL])
    parameters = {name: parameter for of_chunk in named for name, parameter in of_chunk}
    for name, leaf in _mapping(tree, GRADIENTS):
        parameter = parameters.get(name)
        if parameter is None:
            plan.unexpected.append(f"{GRADIENTS}/{name}")
            continue
        if isinstance(leaf, dict) and "name" in leaf:
            gradient: Any = _tensors(plan).new_beside(leaf["name"], parameter, None, parameter.device)
        else:
            gradient = plan.destinations.decode(leaf, f"{GRADIENTS}/{name}", parameter.device)
        plan.finish.append(partial(setattr, parameter, "grad", gradient))


def _tensors(plan: RestorePlan) -> Destinations:
    assert isinstance(plan.destinations, Destinations)
    return plan.destinations


def _mapping(tree: JSON, path: str) -> list[tuple[str, JSON]]:
    """The items of a tree that is a dict, in either encoding (the type of the keys decides)."""
    if isinstance(tree, dict):
        if TAG not in tree:
            return list(tree.items())
        if tree[TAG] in ("dict", "odict"):
            return [(key, value) for key, value in tree["v"]]
    raise CorruptObject(f"the tree of {path!r} is not a dict")


def _fill(plan: RestorePlan, path: str, leaf: JSON, target: Any, flat: Flat | None) -> bool:
    """Fill a live tensor, or each inner tensor of a live wrapper. False if nothing can be placed."""
    inner = inner_tensors(path, target) if isinstance(target, torch.Tensor) else None
    if inner is None:
        part = _fitting(plan, path, leaf, target, flat)
        if part is not None:
            _tensors(plan).fill(leaf["name"], part)
        return part is not None
    if not _has_inner(leaf, inner):
        plan.mismatched.append(f"{path}: not a {kind_of(target)} of {', '.join(inner)} in the checkpoint")
        return False
    plan.finish.append(partial(drop_cached, target))
    placed = [_fill(plan, f"{path}/{name}", leaf[name], one, None) for name, one in inner.items()]
    return all(placed)


def _has_inner(leaf: JSON, inner: Mapping[str, torch.Tensor]) -> bool:
    return isinstance(leaf, dict) and TAG not in leaf and leaf.keys() == inner.keys()


def _wrapper_for(leaf: JSON, live: Any, parameter: torch.Tensor) -> torch.Tensor | None:
    """The wrapper that takes up saved optimizer state: the live one, or a new one of the parameter's type."""
    if not isinstance(leaf, dict) or TAG in leaf or is_plain_type(parameter):
        return None
    found = live if isinstance(live, torch.Tensor) else torch.zeros_like(parameter.detach())
    inner = inner_tensors("", found)
    return found if inner is not None and _has_inner(leaf, inner) else None


def _fitting(plan: RestorePlan, name: str, leaf: JSON, target: Any, flat: Flat | None) -> TensorPart | None:
    """The live part that receives a saved tensor. Records a mismatch, and returns None if nothing can be placed."""
    if not (isinstance(leaf, dict) and leaf.get(TAG) == "tensor" and isinstance(target, torch.Tensor)):
        plan.mismatched.append(f"{name}: a tensor on one side only")
        return None
    dtype, shape = _tensors(plan).describe(leaf["name"])
    part = part_of(name, target, flat)
    if part.shape != shape:
        plan.resized.add(id(target))
        plan.mismatched.append(f"{name}: {list(shape)} in the checkpoint, {list(part.shape)} here")
        return None
    if part.dtype != dtype:
        plan.mismatched.append(f"{name}: {dtype} in the checkpoint, {part.dtype} here")
    return part


def _same(plan: RestorePlan, entry: str, target: torch.Tensor, flat: Flat | None) -> TensorPart | None:
    if not is_plain_type(target):
        return None
    part = part_of(entry, target, flat)
    return part if _tensors(plan).describe(entry) == (part.dtype, part.shape) else None


Ties = Mapping[str, frozenset[str]]
"""All names of the same tensor, by each of them."""


def ties(named: Iterable[tuple[str, Hashable]]) -> Ties:
    """Names of the same object are tied."""
    names: dict[Hashable, set[str]] = defaultdict(set)
    for name, thing in named:
        names[thing].add(name)
    return {name: frozenset(tied) for tied in names.values() if len(tied) > 1 for name in tied}


def give_to_all(saved: Ties, states: dict[str, Any], groups: Iterable[dict[str, Any]]) -> None:
    """Add all names of a tied parameter to the saved groups and states that have one of them."""
    held = {name for group in groups for name in group["params"]}
    for group in groups:
        for name in list(group["params"]):
            for other in sorted(saved.get(name, frozenset()) - held):
                held.add(other)
                group["params"].append(other)
                if name in states:
                    states[other] = states[name]


def without_further_names(names: Iterable[str], live: Ties, known: Iterable[str]) -> list[str]:
    """The names that are not an alias of a known live parameter."""
    found = set(known)
    return sorted(name for name in names if not live.get(name, frozenset()) & found)
