"""Plan the restore of modules and optimizers: match their tensors with the entries of a checkpoint."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn

from ckpt.capture.describe import measure_state
from ckpt.capture.modules import EXTRA_STATE, canonical, is_own, own_loading, unwrap
from ckpt.capture.optimizers import NamedOptimizer
from ckpt.capture.parameters import Leaf
from ckpt.capture.parts import drop_cached, inner_tensors, is_plain_type, kind_of
from ckpt.capture.train_state import GRADIENTS, MODEL, TrainState
from ckpt.dtypes import NAMES
from ckpt.restoring.destinations import Destinations
from ckpt.restoring.plan import RestorePlan
from ckptstore.errors import CorruptObject, StateMismatch
from ckptstore.format.documents import JSON
from ckptstore.format.trees import TAG, entry_of, items_of, leaves


def plan_objects(plan: RestorePlan, trees: Mapping[str, JSON], state: TrainState) -> None:
    """Add the modules and optimizers of a state, and the gradients of the model, to the plan."""
    state.reshard()
    modules = {item: dict(_mapping(trees[item], item)) for item in state.modules if item in trees}
    plan.matching = plan.surgery.match(modules, state, plan.saved_as)
    for item in state.modules:
        if item not in state.placed and plan.has(trees, item):
            _plan_modules(plan, item, state, trees[item])
    # The entries of the checkpoint's parameters, by name. Tied ones share one.
    entries = {
        state.prefix(item) + name: entry
        for item, saved in modules.items()
        for name, leaf in plan.renamed(saved.items(), state.prefix(item)).items()
        if (entry := _first_entry(leaf)) is not None
    }
    for item in state.named_optimizers:
        if plan.has(trees, item):
            _plan_optimizers(plan, item, state, trees[item], entries)
    if GRADIENTS in trees and MODEL in state.modules:
        _plan_gradients(plan, state, trees[GRADIENTS])


def _plan_modules(plan: RestorePlan, item: str, state: TrainState, tree: JSON) -> None:
    saved, found = plan.renamed(_mapping(tree, item), state.prefix(item)), state.leaves(item)
    unknown = saved.keys() - {leaf.name for leaf in found}
    taken: set[str] = set()
    for module in map(unwrap, state.modules[item]):
        prefixes, any_code = own_loading(module)
        values = OrderedDict[str, Any]()
        for leaf in found:
            if leaf.module is module:
                _plan_leaf(plan, leaf, saved, leaf.name.startswith(prefixes), values)
        for name in unknown:
            if name.startswith(prefixes):
                taken.add(name)
                values[name] = plan.destinations.decode(saved[name], f"{item}/{name}")
        if any_code:
            if "metadata" in tree and TAG in tree:
                values._metadata = _Metadata(_metadata_here(plan, tree, state.prefix(item)))  # type: ignore[attr-defined]
            plan.finish.append(partial(_load, plan, item, module, values, prefixes))
    left = {f"{item}/{name}": saved[name] for name in unknown - taken}
    plan.unexpected += left
    plan.there |= left


def _plan_leaf(plan: RestorePlan, leaf: Leaf, saved: Mapping[str, JSON], own: bool, values: dict[str, Any]) -> None:
    """own: code of the module sees the value first. It gets one that is not the live one, and says what is missing.
    values: for `load_state_dict`; torch copies live ones to themselves."""
    module, place = leaf.module, leaf.raw.rpartition(".")
    assert module is not None
    if leaf.path in plan.matching.left:
        values[leaf.raw] = leaf.value
        return
    if leaf.name not in saved:
        plan.missing += [] if own else [leaf.path]
        plan.here[leaf.path] = _described(leaf)
        return
    tree = saved[leaf.name]
    if own and entry_of(tree) and isinstance(leaf.value, torch.Tensor):
        plan.overwritten.add(leaf.path)
        values[leaf.raw] = _tensors(plan).new_beside(_entry_here(plan, tree), leaf, leaf.value.device)
    elif own:
        values[leaf.raw] = plan.destinations.decode(tree, leaf.path)
    elif place[2] == EXTRA_STATE:
        owner = module.get_submodule(place[0])
        plan.finish.append(partial(owner.set_extra_state, plan.destinations.decode(tree, leaf.path)))
    elif _fill(plan, tree, leaf):
        plan.overwritten.add(leaf.path)
        values[leaf.raw] = leaf.value


def _metadata_here(plan: RestorePlan, tree: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The saved metadata by the prefixes that the names of its modules have here."""
    saved, found = tree["metadata"], dict(tree["metadata"])
    for old, new in plan.matching.names.items():
        parts = old.removeprefix(prefix).split(".")
        for at in range(len(parts)):
            path, rest = ".".join([*parts[:at], ""]) or ".", ".".join(parts[at:])
            if path in saved and new and new.endswith(rest):
                found[new.removeprefix(prefix).removesuffix(rest) or "."] = saved[path]
    return found


class _Metadata(dict[str, Any]):
    """The metadata of a `state_dict`: by canonical prefix, read by path. Modules without it are of version 1."""

    def get(self, path: str, default: Any = None) -> Any:
        return super().get(canonical(f"{path}."), {"version": 1})


def _load(plan: RestorePlan, item: str, module: nn.Module, values: dict[str, Any], prefixes: tuple[str, ...]) -> None:
    """Call `load_state_dict`, for what own code of the module does then. Adds what does not fit to the plan."""
    own = is_own(module.load_state_dict)
    try:
        said = module.load_state_dict(values, **({} if own and plan.strict else {"strict": False}))
    except RuntimeError as error:
        if "in loading state_dict" not in str(error):
            raise
        plan.mismatched.append(f"{item}: {' '.join(str(error).split())}")
    else:
        for names, keys in zip((plan.missing, plan.unexpected), () if own else said, strict=False):
            names += [f"{item}/{name}" for name in map(canonical, keys) if name.startswith(prefixes)]


def _plan_optimizers(plan: RestorePlan, item: str, state: TrainState, tree: JSON, entries: Mapping[str, str]) -> None:
    """entries: by the names of the checkpoint's parameters."""
    optimizers, saved = state.named_optimizers[item], dict(_mapping(tree, item))
    alone = len(optimizers) == 1
    if not {"state", "groups"} <= saved.keys():
        raise StateMismatch(
            f"the item {item!r} of the checkpoint holds {', '.join(saved) or 'nothing'}, not an optimizer's state",
            "Restore without the optimizer; ckpt.load reads the tensors",
        )
    states = plan.renamed(_mapping(saved.pop("state"), item))
    if any(optimizer.holder.state for optimizer in optimizers):
        plan.overwritten.add(item)
    frame = {key: plan.destinations.decode(value, f"{item}/{key}") for key, value in saved.items()}
    for group in frame["groups"]:
        group["params"] = [*plan.renamed(dict.fromkeys(group["params"]).items())]
    left = plan.matching.left
    everything = {name: leaf for one in optimizers for name, leaf in one.leaves.items() if name not in left}
    renamed = _renamed(plan, state, frame["groups"], everything, entries)
    held = give_to_all({**ties(entries.items()), **renamed}, states, frame["groups"])
    plan.missing += [f"{item}/{name}" for name in everything.keys() - held]
    if left_over := held - everything.keys():
        same = {**ties(state.all_names()), **renamed}
        plan.unexpected += [f"{item}/{n}" for n in sorted(left_over) if everything.keys().isdisjoint(same.get(n, ()))]
    steps_on_device = {
        name for group in frame["groups"] if group.get("fused") or group.get("capturable") for name in group["params"]
    }
    for optimizer in optimizers:
        _compare_groups(plan, optimizer, frame["groups"])
        if plan.unchecked:
            plan.missing += _without_state(optimizer, states)
        here = {name for name, leaf in optimizer.leaves.items() if optimizer.keeps_state_here(leaf)}
        # State without a parameter belongs to the whole optimizer.
        here |= states.keys() - held if alone else set()
        named = {
            name: live
            for name in left & optimizer.leaves.keys()
            if (live := optimizer.live_state(optimizer.leaves[name]))
        }
        for name in filter(here.__contains__, states):
            leaf = optimizer.leaves.get(name)
            if leaf is None:
                named[name] = plan.destinations.decode(states[name], f"{item}/state/{name}")
            elif id(leaf.value) not in plan.resized:
                named[name] = _decode_state(plan, optimizer, leaf, states[name], name in steps_on_device)
        plan.finish.append(partial(optimizer.load_state, {"state": named, **frame}, alone))


def _renamed(
    plan: RestorePlan,
    state: TrainState,
    groups: Iterable[dict[str, Any]],
    live: Mapping[str, Leaf],
    entries: Mapping[str, str],
) -> Ties:
    """The live names of saved parameters where modules may rename what they load: names on one side only, in their
    order, if the shapes agree."""
    names = [name for group in groups for name in group["params"]]
    old, new = [name for name in names if name not in live], [name for name in live if name not in names]
    if not any(own_loading(unwrap(chunk))[0] for chunks in state.modules.values() for chunk in chunks):
        return {}
    shapes = [plan.destinations.entry(entries[name])[1] if name in entries else None for name in old]
    same = shapes == [tuple(live[name].value.shape) for name in new]
    return {name: {other} for name, other in zip(old, new, strict=True)} if same else {}


def _compare_groups(plan: RestorePlan, optimizer: NamedOptimizer, saved: list[dict[str, Any]]) -> None:
    """Record saved parameter groups of another optimizer class, or without the options of a live group."""
    optimizer.left = plan.matching.left
    if kinds := optimizer.other_classes(saved):
        here = type(optimizer.holder).__name__
        plan.mismatched.append(f"{optimizer.item}: state of {', '.join(kinds)} in the checkpoint, {here} here")
    try:
        optimizer.check_groups(saved)
    except StateMismatch as error:
        plan.refused = plan.refused or error


def _without_state(optimizer: NamedOptimizer, saved: Collection[str]) -> list[str]:
    """The state that groups should have, of which nothing is saved. saved: names of the parameters that have state."""
    lost: list[str] = []
    for group, held in zip(optimizer.optimizer.param_groups, optimizer.groups, strict=True):
        leaves = [leaf for one in held for leaf in one if leaf.value.requires_grad]
        if {leaf.name for leaf in leaves}.isdisjoint(saved) and (saved or any(measure_state(optimizer.holder, group))):
            lost += [f"{leaf.item}/state/{leaf.name}" for leaf in leaves]
    return lost


def _decode_state(plan: RestorePlan, optimizer: NamedOptimizer, leaf: Leaf, tree: JSON, step_on_device: bool) -> Any:
    """The state of one parameter; tensors the optimizer already has are filled in place.

    step_on_device: `step` belongs on the parameter's device, where `fused` and `capturable` need it; otherwise where it
    was saved. Optimizer.load_state_dict does the same.
    """
    path, parameter = f"{leaf.item}/state/{leaf.name}", leaf.value
    if not isinstance(tree, dict) or TAG in tree:
        return plan.destinations.decode(tree, path)
    live, destinations = optimizer.live_state(leaf), _tensors(plan)
    state: dict[str, Any] = {}
    for key, saved in tree.items():
        target: Any = live.get(key)
        if (wrapper := _wrapper_for(saved, target, parameter)) is not None:
            _fill(plan, saved, Leaf(leaf.item, f"state/{leaf.name}/{key}", wrapper, leaf.unit))
            state[key] = wrapper
            continue
        if (entry := entry_of(saved)) is None:
            if isinstance(target, torch.Tensor) and "class" not in (saved or {}):
                plan.mismatched.append(f"{path}/{key}: {_kind(saved)} in the checkpoint, {kind_of(target)} here")
            state[key] = destinations.decode(saved, f"{path}/{key}", parameter.device)
            continue
        _check_growth(plan, leaf, f"{path}/{key}", entry)
        moves = "device" in saved or (key == "step" and step_on_device)
        device = parameter.device if moves else torch.device("cpu")
        fits = isinstance(target, torch.Tensor) and (key != "step" or target.device == device)
        part = leaf.part_of(entry, target) if fits and is_plain_type(target) else None
        dtype, shape = destinations.describe(entry)
        if part is not None and part.shape == shape and (part.dtype == dtype or _casts(plan, dtype, part.dtype)):
            destinations.fill(entry, part)
            state[key] = target
        elif "plain" in saved:
            state[key] = destinations.new(entry, device)
        else:
            state[key] = _new_beside(plan, entry, leaf, device, key)
    return state


def _check_growth(plan: RestorePlan, leaf: Leaf, path: str, entry: str) -> None:
    """Refuse optimizer state that has neither the shape of its parameter nor a single element: where would it grow?"""
    saved, (_, shape) = plan.matching.grown.get(leaf.name), plan.destinations.entry(entry)
    if saved not in (None, shape) and prod(shape) > 1:
        plan.refused = plan.refused or StateMismatch(
            f"{path} has the shape {list(shape)}, which does not show how it grows with its parameter",
            "Leave the parameter out with skip=, or restore without the optimizer; nothing was changed",
        )


def _casts(plan: RestorePlan, saved: torch.dtype, here: torch.dtype) -> bool:
    """Whether the caller has asked for this conversion."""
    return bool(plan.surgery.cast) and saved.is_floating_point and here.is_floating_point


def _new_beside(plan: RestorePlan, entry: str, leaf: Leaf, device: torch.device, key: str) -> torch.Tensor:
    """A new tensor for state of a parameter. One that is cast gets the type that Optimizer.load_state_dict gives it."""
    destinations, parameter = _tensors(plan), leaf.value
    dtype, shape = destinations.describe(entry)
    if key != "step" and _casts(plan, dtype, parameter.dtype):
        dtype = parameter.dtype
    return destinations.new_beside(entry, leaf, device, dtype, plan.matching.grown.get(leaf.name) == shape)


def _described(leaf: Leaf) -> str:
    """Shape and type of a live tensor."""
    return f"{list(leaf.part.shape)} {NAMES.get(leaf.value.dtype)}" if isinstance(leaf.value, torch.Tensor) else ""


def _first_entry(leaf: JSON) -> str | None:
    """The entry of a tensor, or the first one of a wrapper."""
    return next((entry for _, one in leaves(leaf, "") if (entry := entry_of(one))), None)


def _plan_gradients(plan: RestorePlan, state: TrainState, tree: JSON) -> None:
    parameters = state.parameters.by_name[MODEL]
    for name, saved in plan.renamed(_mapping(tree, GRADIENTS)).items():
        leaf = parameters.get(name)
        if leaf is None or id(leaf.value) in plan.resized:
            plan.unexpected.append(f"{GRADIENTS}/{name}")
            continue
        if (entry := entry_of(saved)) is not None:
            gradient: Any = _new_beside(plan, entry, leaf, leaf.value.device, "grad")
        else:
            gradient = plan.destinations.decode(saved, f"{GRADIENTS}/{name}", leaf.value.device)
        changes = bool(plan.surgery.cast) or leaf.name in plan.matching.grown
        plan.finish.append(partial(_set_gradient, leaf.value, gradient, changes))


def _set_gradient(parameter: torch.Tensor, gradient: torch.Tensor, changes: bool) -> None:
    """changes: it may have been saved in another shape and type, and a small one lies in the tree itself as it was."""
    if changes and (gradient.shape, gradient.dtype) != (parameter.shape, parameter.dtype):
        whole = torch.zeros_like(parameter)
        whole[tuple(map(slice, gradient.shape))] = gradient
        gradient = whole
    parameter.grad = gradient


def _entry_here(plan: RestorePlan, saved: JSON) -> str:
    return plan.own.get(saved["name"], saved["name"])


def _tensors(plan: RestorePlan) -> Destinations:
    assert isinstance(plan.destinations, Destinations)
    return plan.destinations


def _mapping(tree: JSON, path: str) -> list[tuple[str, JSON]]:
    """The items of a tree that is a dict."""
    if (found := items_of(tree, path)) is None:
        raise CorruptObject(f"the tree of {path!r} is not a dict")
    return found


def _fill(plan: RestorePlan, saved: JSON, leaf: Leaf) -> bool:
    """Fill a live tensor, or each inner tensor of a live wrapper. False if nothing can be placed."""
    inner = leaf.inner()
    if inner is None:
        return _fill_tensor(plan, saved, leaf)
    plan.finish.append(partial(drop_cached, leaf.value))
    within = _inner(saved)
    if within.keys() != {one.raw for one in inner}:
        (dtype, shape), live = plan.saved_as(saved), leaf.value
        make = plan.surgery.make(leaf.item, leaf.name)
        fits = make and shape == live.shape and "float" in dtype and live.is_floating_point()
        if fits and _tensors(plan).make(_entry_here(plan, saved), live, make):
            return True
        names = ", ".join(one.raw for one in inner)
        plan.mismatched.append(
            f"{leaf.path}: not a {kind_of(live)} of {names} in the checkpoint, nor made by a function of cast="
        )
        return False
    placed = [_fill(plan, within[one.raw], one) for one in inner]
    return all(placed)


def _inner(saved: JSON) -> dict[str, JSON]:
    """The trees of a wrapper's inner tensors; nothing if it is no dict."""
    return dict(items_of(saved, "") or ())


def _kind(saved: JSON) -> str:
    """The type of a saved value, for messages."""
    return str(saved.get(TAG, "dict")) if isinstance(saved, dict) else type(saved).__name__


def _wrapper_for(saved: JSON, live: Any, parameter: torch.Tensor) -> torch.Tensor | None:
    """The wrapper that takes up saved optimizer state: the live one, or a new one of the parameter's type."""
    if not (within := _inner(saved)) or is_plain_type(parameter):
        return None
    found = live if isinstance(live, torch.Tensor) else torch.zeros_like(parameter.detach())
    inner = inner_tensors("", found)
    return found if inner is not None and within.keys() == inner.keys() else None


def _fill_tensor(plan: RestorePlan, saved: JSON, leaf: Leaf) -> bool:
    """Fill a live tensor. Records a mismatch; False if nothing can be placed."""
    name, target = leaf.path, leaf.value
    if not (entry_of(saved) and isinstance(target, torch.Tensor)):
        same = not isinstance(target, torch.Tensor) and not [*leaves(saved, name)]
        if not same or plan.destinations.decode(saved, name) != target:
            plan.mismatched.append(
                f"{name}: {_kind(saved)} in the checkpoint, {kind_of(target)} here, which nothing loads"
            )
        return False
    dtype, shape = _tensors(plan).describe(saved["name"])
    part = leaf.part
    if (part.shape, part.dtype) != (shape, dtype):
        plan.here[name], plan.there[name] = _described(leaf), saved
    if part.shape != shape and plan.matching.grown.get(name) != shape:
        plan.resized.add(id(target))
        plan.mismatched.append(f"{name}: {list(shape)} in the checkpoint, {list(part.shape)} here")
        return False
    if part.dtype != dtype and not _casts(plan, dtype, part.dtype):
        plan.mismatched.append(f"{name}: {dtype} in the checkpoint, {part.dtype} here")
    _tensors(plan).fill(_entry_here(plan, saved), part)
    return True


Ties = Mapping[str, set[str]]
"""All names of the same tensor, by each of them."""


def ties(named: Iterable[tuple[str, Hashable]]) -> Ties:
    """Names of the same object are tied."""
    names = defaultdict[Hashable, set[str]](set)
    for name, thing in named:
        names[thing].add(name)
    return {name: tied for tied in names.values() if len(tied) > 1 for name in tied}


def give_to_all(saved: Ties, states: dict[str, Any], groups: Iterable[dict[str, Any]]) -> set[str]:
    """Add all names of a tied parameter to the saved groups and states that have one of them. Returns all names."""
    held = {name for group in groups for name in group["params"]}
    for group in groups:
        for name in list(group["params"]):
            for other in sorted(saved.get(name, set()) - held):
                held.add(other)
                group["params"].append(other)
                if name in states:
                    states[other] = states[name]
    return held
