"""Optimizers by parameter name instead of parameter index.

    {"state": {<parameter name>: {...}}, "groups": [{"params": [<parameter name>...], <option>: ...}]}

so that reordering parameter groups, wrapping or sharding the model, or giving its parameters to several optimizers
between save and restore changes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch.optim import Optimizer

from ckptstore.errors import StateMismatch

Names = Mapping[int, str]
"""id of a parameter to its name."""

_NOT_OPTIONS = ("params", "param_names")


def parameters_by_name(optimizer: Optimizer, names: Names) -> dict[str, torch.Tensor]:
    """Every parameter of the optimizer. One that belongs to no module is named by its place."""
    found: dict[str, torch.Tensor] = {}
    for g, group in enumerate(optimizer.param_groups):
        given = group.get("param_names") or [f"group{g}.param{i}" for i in range(len(group["params"]))]
        for parameter, fallback in zip(group["params"], given, strict=True):
            found[names.get(id(parameter), fallback)] = parameter
    return found


def keeps_state_here(optimizer: Optimizer, parameter: torch.Tensor) -> bool:
    """Whether this rank keeps the state of a parameter: ZeroRedundancyOptimizer gives each to one rank."""
    zero = _as_zero(optimizer)
    return zero is None or bool(zero._param_to_rank[parameter] == zero.rank)


def state_holder(optimizer: Optimizer) -> Optimizer:
    """The optimizer that keeps the state."""
    zero = _as_zero(optimizer)
    return optimizer if zero is None else cast(Optimizer, zero.optim)


def _as_zero(optimizer: Optimizer) -> Any:
    """The optimizer, if it is a ZeroRedundancyOptimizer; its module is slow to import, and warns."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return optimizer if module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer) else None


def optimizer_state(optimizer: Optimizer, names: Names) -> dict[str, Any]:
    """The named state; tensors alias the live ones. No collective."""
    parameters = parameters_by_name(optimizer, names)
    holder = state_holder(optimizer)
    if holder is not optimizer:
        # Its state_dict is gathered from all ranks first.
        by_id = {id(parameter): name for name, parameter in parameters.items()}
        live = holder.state
        groups = [
            {"params": [by_id[id(p)] for p in group["params"]], **_options(group)} for group in optimizer.param_groups
        ]
        return {"state": {name: live[p] for name, p in parameters.items() if p in live}, "groups": groups}
    state = optimizer.state_dict()
    ordered = list(parameters)
    named = {ordered[key] if isinstance(key, int) else key: value for key, value in state["state"].items()}
    groups = [{"params": [ordered[i] for i in group["params"]], **_options(group)} for group in state["param_groups"]]
    extra = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
    return {"state": named, "groups": groups, **extra}


def load_optimizer_state(optimizer: Optimizer, named: dict[str, Any], names: Names) -> None:
    """Give an optimizer the named state back. Tensors are taken as they are, never cast.

    Optimizer.load_state_dict would cast state to its parameter's type, which is not exact.
    An optimizer that overrides it gets the indexed state_dict it expects.
    """
    ordered = parameters_by_name(optimizer, names)
    groups = [_group_options(group, ordered, named["groups"]) for group in optimizer.param_groups]
    inner = state_holder(optimizer)
    if type(inner).load_state_dict is not Optimizer.load_state_dict:
        index = {name: i for i, name in enumerate(ordered)}
        inner.load_state_dict(_indexed(inner, named, groups, index))
        return
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        _update_options(group, options)
    for name, state in named["state"].items():
        inner.state[ordered.get(name, name)] = state
    # What Optimizer.load_state_dict does last: subclasses fill in options that older versions lacked.
    inner.__setstate__({"state": inner.state, "param_groups": inner.param_groups})


def _group_options(
    group: dict[str, Any], ordered: dict[str, torch.Tensor], saved: list[dict[str, Any]]
) -> dict[str, Any]:
    """The saved options for a live group: those of the saved groups that held its parameters."""
    by_id = {id(parameter): name for name, parameter in ordered.items()}
    members = {by_id[id(parameter)] for parameter in group["params"]}
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
        "without the optimizer or rebuild its groups as they were",
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


def all_parameters(optimizers: Iterable[Optimizer], names: Names) -> dict[str, torch.Tensor]:
    """The parameters of several optimizers, by name."""
    return {name: p for optimizer in optimizers for name, p in parameters_by_name(optimizer, names).items()}
