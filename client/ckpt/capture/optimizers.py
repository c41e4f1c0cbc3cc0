"""Optimizers by parameter name instead of parameter index.

    {"state": {<parameter name>: {...}},
     "groups": [{"params": [<parameter name>...], "optimizer_class": <name>, <option>: ...}]}

so that reordering parameter groups, wrapping or sharding the model, or giving its parameters to several optimizers
between save and restore changes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Sequence
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckpt.capture.parameters import OptimizerState
from ckpt.capture.train_state import TrainState
from ckptstore.errors import StateMismatch, UnsupportedObject

CLASS = "optimizer_class"
"""Key of a saved group: the name of its optimizer's class. Checkpoints of older versions lack it."""
_NOT_OPTIONS = ("params", "param_names", CLASS)


def parameters_by_name(optimizer: Optimizer, train_state: TrainState) -> dict[str, torch.Tensor]:
    """Every parameter of the optimizer. One that belongs to no module is named by its place."""
    return {name: p for group in named_groups(optimizer, train_state) for held in group for name, p in held.items()}


def named_groups(optimizer: Optimizer, train_state: TrainState) -> list[list[dict[str, torch.Tensor]]]:
    """By group and by parameter: the names, and live parameters, that it stands for."""
    named, parameters = [], train_state.parameters
    for g, group in enumerate(optimizer.param_groups):
        given = group.get("param_names") or [f"group{g}.param{i}" for i in range(len(group["params"]))]
        named.append([parameters.known_as(p, fallback) for p, fallback in zip(group["params"], given, strict=True)])
    return named


def group_names(optimizer: Optimizer, train_state: TrainState) -> list[list[str]]:
    """The names of the parameters of each group."""
    return [[name for held in group for name in held] for group in named_groups(optimizer, train_state)]


def keeps_state_here(optimizer: Optimizer, parameter: torch.Tensor) -> bool:
    """Whether this rank keeps the state of a parameter: ZeroRedundancyOptimizer gives each to one rank."""
    zero = _as_zero(optimizer)
    return zero is None or bool(zero._param_to_rank[parameter] == zero.rank)


def state_rank(optimizer: Optimizer, parameter: torch.Tensor) -> int | None:
    """The global rank that alone keeps the state of a parameter; None: each rank that has the parameter does."""
    zero = _as_zero(optimizer)
    if zero is None:
        return None
    return torch.distributed.get_global_rank(zero.process_group, zero._param_to_rank[parameter])


def state_holder(optimizer: Optimizer) -> Optimizer:
    """The optimizer that keeps the state."""
    zero = _as_zero(optimizer)
    return optimizer if zero is None else cast(Optimizer, zero.optim)


def _as_zero(optimizer: Optimizer) -> Any:
    """The optimizer, if it is a ZeroRedundancyOptimizer; its module is slow to import, and warns."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return optimizer if module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer) else None


def live_state(optimizer: Optimizer, parameter: torch.Tensor, train_state: TrainState) -> OptimizerState:
    """What the optimizer keeps now for one parameter; tensors alias the live ones."""
    pack, state = train_state.parameters.packs.get(id(parameter)), state_holder(optimizer).state
    if pack is None:
        return cast(OptimizerState, state.get(parameter, {}))
    return pack.take(parameter, state.get(pack.parameter, {}))


def check_sharded_alike(path: str, parameter: torch.Tensor, state: Any) -> None:
    """UnsupportedObject if state of a sharded parameter has the shape of this rank's shard, but does not say so.

    It would be taken for a copy that all ranks hold alike, and that of one of them would be saved for all.
    """
    if not isinstance(parameter, DTensor) or not isinstance(state, dict):
        return
    local = parameter._local_tensor.shape
    for key, value in state.items() if local != parameter.shape else ():
        plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        if plain and value.shape == local and value.numel() > 1:
            raise UnsupportedObject(
                f"{path}/{key} is a plain tensor of this rank's shard of a sharded parameter",
                "Have the optimizer keep it as a DTensor like the parameter, such as torch.zeros_like(parameter) makes",
            )


def optimizer_state(optimizer: Optimizer, train_state: TrainState) -> dict[str, Any]:
    """The named state; tensors alias the live ones. No collective."""
    groups, packs = named_groups(optimizer, train_state), train_state.parameters.packs
    names = [[name for held in group for name in held] for group in groups]
    if state_holder(optimizer) is not optimizer:
        # Its state_dict is gathered from all ranks first.
        live = {
            name: live_state(optimizer, p, train_state)
            for group in groups
            for held in group
            for name, p in held.items()
        }
        state_here = {name: state for name, state in live.items() if state}
        return {"state": state_here, "groups": describe_groups(optimizer, names)}
    state = optimizer.state_dict()
    named: dict[str, Any] = {}
    ordered = [held for group in groups for held in group]
    for key, value in state["state"].items():
        stands_for = ordered[key] if isinstance(key, int) else {}
        if not any(id(one) in packs for one in stands_for.values()):
            named[next(iter(stands_for), key)] = value
            continue
        for name, one in stands_for.items():
            if one.numel():  # others keep the state of what this rank has nothing of
                named[name] = packs[id(one)].take(one, value)
    frame = _described(optimizer, names, state["param_groups"])
    extra = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
    return {"state": named, "groups": frame, **extra}


def describe_groups(optimizer: Optimizer, names: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """The options of each group, the names of its parameters, and the class of the optimizer."""
    return _described(optimizer, names, optimizer.param_groups)


def _described(
    optimizer: Optimizer, names: Sequence[Sequence[str]], groups: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    kind = _class_of(optimizer)
    return [{"params": n, CLASS: kind, **_options(group)} for n, group in zip(names, groups, strict=True)]


def _class_of(optimizer: Optimizer) -> str:
    return type(state_holder(optimizer)).__name__


def other_classes(optimizer: Optimizer, names: Container[str], saved: Sequence[dict[str, Any]]) -> list[str]:
    """The classes of the optimizers that saved the parameters `names`, if they are known and not this one's."""
    found = {group.get(CLASS) for group in saved if any(name in names for name in group["params"])}
    return sorted(str(kind) for kind in found - {None, _class_of(optimizer)})


def check_groups(optimizer: Optimizer, saved: Sequence[dict[str, Any]], train_state: TrainState) -> None:
    """StateMismatch if the saved parameter groups have no options for a live one. Tensors are not compared yet."""
    known = [{key: value for key, value in group.items() if not isinstance(value, torch.Tensor)} for group in saved]
    for held, group in zip(named_groups(optimizer, train_state), optimizer.param_groups, strict=True):
        _group_options([name for one in held for name in one], group, known)


def load_optimizer_state(
    optimizer: Optimizer, named: dict[str, Any], train_state: TrainState, alone: bool = True
) -> None:
    """Replace the state of an optimizer by the named state. Tensors are taken as they are, never cast.

    State that is not in `named` is removed, as Optimizer.load_state_dict does. alone: False if further optimizers
    share the item; state that belongs to no parameter is then left as it is.
    Optimizer.load_state_dict would cast state to its parameter's type, which is not exact.
    An optimizer that overrides it gets the indexed state_dict it expects.
    """
    held, known = named_groups(optimizer, train_state), train_state.parameters
    names = [[name for one in group for name in one] for group in held]
    groups = [
        _group_options(members, group, named["groups"])
        for members, group in zip(names, optimizer.param_groups, strict=True)
    ]
    inner = state_holder(optimizer)
    live = {name: parameter for group in held for one in group for name, parameter in one.items()}
    if type(inner).load_state_dict is not Optimizer.load_state_dict:
        index = {name: i for i, name in enumerate(live)}
        inner.load_state_dict(_indexed(inner, named, groups, index))
        return
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        _update_options(group, options)
    for key in [key for key in inner.state if alone or isinstance(key, torch.Tensor)]:
        del inner.state[key]
    for name, state in named["state"].items():
        if id(live.get(name)) not in known.packs:
            inner.state[live.get(name, name)] = state
    for pack in {id(pack): pack for one in live.values() if (pack := known.packs.get(id(one)))}.values():
        by_view = {view: named["state"].get(known.names[id(one)], {}) for view, one in pack.views.items()}
        if joined := pack.join(by_view):
            inner.state[pack.parameter] = joined
    # What Optimizer.load_state_dict does last: subclasses fill in options that older versions lacked.
    inner.__setstate__({"state": inner.state, "param_groups": inner.param_groups})


def _group_options(names: Iterable[str], group: dict[str, Any], saved: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The saved options for a live group: those of the saved groups that held its parameters."""
    members = set(names)
    held = [candidate for candidate in saved if members & set(candidate["params"])]
    if members <= {name for candidate in held for name in candidate["params"]}:
        options = [_options(candidate) for candidate in held]
        if options and all(_equal(options[0], other) for other in options[1:]):
            return options[0]
        if not members:
            return _options(saved[0]) if len(saved) == 1 else _options(group)
    raise StateMismatch(
        f"no saved parameter group holds all of {sorted(members)[:3]} and {max(0, len(members) - 3)} more",
        "Groups may be reordered or split between save and restore, and merged where their options agree; restore "
        "without the optimizer or rebuild its groups as they were; nothing was changed",
    )


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        return bool(torch.equal(torch.as_tensor(first), torch.as_tensor(second)))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_equal(value, second[key]) for key, value in first.items())
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(_equal, first, second))
    return bool(first == second)


def _indexed(
    optimizer: Optimizer, named: dict[str, Any], groups: list[dict[str, Any]], index: dict[str, int]
) -> dict[str, Any]:
    packed, start = [], 0
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        count = len(group["params"])
        packed.append({**options, "params": list(range(start, start + count))})
        start += count
    extra = {key: value for key, value in named.items() if key not in ("state", "groups")}
    state = {index.get(name, name): value for name, value in named["state"].items()}
    return {"state": state, "param_groups": packed, **extra}


def _update_options(group: dict[str, Any], options: dict[str, Any]) -> None:
    for key, value in options.items():
        live = group.get(key)
        if isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor) and live.shape == value.shape:
            live.copy_(value)  # a compiled step holds this very tensor
        else:
            # Several groups may take over the options of one.
            group[key] = value.clone() if isinstance(value, torch.Tensor) else value


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}
