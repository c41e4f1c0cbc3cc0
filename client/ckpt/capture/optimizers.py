"""Optimizers by parameter name instead of parameter index.

    {"state": {<parameter name>: {...}}, "groups": [{"params": [<parameter name>...], <option>: ...}]}

so that reordering parameter groups, or wrapping the model, between save and restore changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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


def optimizer_state(optimizer: Optimizer, names: Names) -> dict[str, Any]:
    """The named state; tensors alias the live ones."""
    state = optimizer.state_dict()
    ordered = list(parameters_by_name(optimizer, names))
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
    index = {name: i for i, name in enumerate(ordered)}
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        optimizer.load_state_dict(_indexed(optimizer, named, groups, index))
        return
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        _update_options(group, options)
    for name, state in named["state"].items():
        optimizer.state[ordered.get(name, name)] = state
    # What Optimizer.load_state_dict does last: subclasses fill in options that older versions lacked.
    optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})


def _group_options(
    group: dict[str, Any], ordered: dict[str, torch.Tensor], saved: list[dict[str, Any]]
) -> dict[str, Any]:
    """The saved options for a live group: those of the saved group that held its parameters."""
    by_id = {id(parameter): name for name, parameter in ordered.items()}
    members = {by_id[id(parameter)] for parameter in group["params"]}
    for candidate in saved:
        if members <= set(candidate["params"]):
            return _options(candidate)
    raise StateMismatch(
        f"no saved parameter group holds all of {sorted(members)[:3]} and {max(0, len(members) - 3)} more",
        "Groups may be reordered between save and restore, but not merged; restore without the optimizer "
        "or rebuild its groups as they were",
    )


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
            group[key] = value


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}
