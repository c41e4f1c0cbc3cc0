"""Optimizers by parameter name instead of parameter index.

    {"state": {<parameter name>: {...}},
     "groups": [{"params": [<parameter name>...], "optimizer_class": <name>, <option>: ...}]}

so that reordering parameter groups, wrapping or sharding the model, or giving its parameters to several optimizers
between save and restore changes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from itertools import chain, count, islice
from typing import Any, cast

import torch
from torch.optim import Optimizer

from ckpt.capture.leaves import Change
from ckpt.capture.parameters import Leaf, OptimizerState, Parameters
from ckpt.capture.parts import Ranks
from ckptstore.errors import StateMismatch

CLASS = "optimizer_class"
"""Key of a saved group: the name of its optimizer's class. Checkpoints of older versions lack it."""
_NOT_OPTIONS = ("params", "param_names", CLASS)


class NamedOptimizer:
    """An optimizer of a state, with its parameters by name. One that belongs to no module is named by its place."""

    def __init__(self, item: str, optimizer: Optimizer, parameters: Parameters) -> None:
        self.item = item
        self.optimizer = optimizer
        self._zero = _as_zero(optimizer)
        self.holder = state_holder(optimizer)
        """The optimizer that keeps the state."""
        self.groups: list[list[list[Leaf]]] = []
        """By group and by parameter: the leaves that it stands for. One, but for a flat parameter."""
        self._known, self._packs = parameters, parameters.packs
        for g, group in enumerate(optimizer.param_groups):
            given = group.get("param_names") or [f"group{g}.param{i}" for i in range(len(group["params"]))]
            pairs = zip(group["params"], given, strict=True)
            self.groups.append([self._leaves_of(parameter, name) for parameter, name in pairs])
        self.leaves = {leaf.name: leaf for group in self.groups for held in group for leaf in held}
        """Every parameter."""
        self.left: Collection[str] = ()
        """The names of those that a restore leaves as they are, with their state and options."""

    @property
    def names(self) -> list[list[str]]:
        """The names of the parameters of each group."""
        return [[leaf.name for held in group for leaf in held] for group in self.groups]

    def _leaves_of(self, parameter: torch.Tensor, name: str) -> list[Leaf]:
        pack = self._packs.get(id(parameter))
        return [self._leaf(one, name) for one in ([parameter] if pack is None else pack.views.values())]

    def _leaf(self, parameter: torch.Tensor, name: str) -> Leaf:
        known = self._known.leaves.get(id(parameter))
        name = name if known is None else known.name
        unit = f"{self.item}/{name}" if known is None or self.holder is not self.optimizer else known.unit
        return self._known.leaf(self.item, name, parameter, unit, change=Change.STEP)

    def keeps_state_here(self, leaf: Leaf) -> bool:
        """Whether this rank keeps the state of a parameter: ZeroRedundancyOptimizer gives each to one rank."""
        return self._zero is None or bool(self._zero._param_to_rank[leaf.value] == self._zero.rank)

    def keepers(self, leaf: Leaf) -> tuple[Ranks, ...]:
        """The global rank that alone keeps the state of a parameter; none if each rank that has the parameter does."""
        if self._zero is None:
            return ()
        rank = self._zero._param_to_rank[leaf.value]
        return ((torch.distributed.get_global_rank(self._zero.process_group, rank),),)

    def live_state(self, leaf: Leaf) -> OptimizerState:
        """The state that the optimizer keeps now for one parameter; tensors alias the live ones."""
        pack, state = self._packs.get(id(leaf.value)), self.holder.state
        if pack is None:
            return cast(OptimizerState, state.get(leaf.value, {}))
        return pack.take(leaf.value, state.get(pack.parameter, {}))

    def state(self) -> dict[str, Any]:
        """The named state; tensors alias the live ones. No collective."""
        if self.holder is not self.optimizer:
            # Its state_dict is gathered from all ranks first.
            state_here = {name: live for name, leaf in self.leaves.items() if (live := self.live_state(leaf))}
            return {"state": state_here, "groups": describe_groups(self.optimizer, self.names)}
        state = self.optimizer.state_dict()
        named: dict[str, Any] = {}
        ordered = list(chain(*self.groups))
        for key, value in state["state"].items():
            if not isinstance(key, int):
                named[key] = value
                continue
            for leaf in ordered[key]:
                if (pack := self._packs.get(id(leaf.value))) is None:
                    named[leaf.name] = value
                elif leaf.value.numel():  # others keep the state of what this rank has nothing of
                    named[leaf.name] = pack.take(leaf.value, value)
        frame = describe_groups(self.optimizer, self.names, state["param_groups"])
        extra = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
        return {"state": named, "groups": frame, **extra}

    def other_classes(self, saved: Sequence[dict[str, Any]]) -> list[str]:
        """The classes of the optimizers that saved these parameters, if they are known and not this one's."""
        found = {group.get(CLASS) for group in saved if any(name in self.leaves for name in group["params"])}
        return sorted(str(kind) for kind in found - {None, _class_of(self.optimizer)})

    def check_groups(self, saved: Sequence[dict[str, Any]]) -> None:
        """StateMismatch if the saved groups have no options for a live one. Tensors are not compared yet."""
        known = [{key: value for key, value in group.items() if not isinstance(value, torch.Tensor)} for group in saved]
        self._saved_options(known)

    def _saved_options(self, saved: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The saved options of each live group."""
        pairs = zip(self.names, self.optimizer.param_groups, strict=True)
        return [_group_options(names, self.left, group, saved) for names, group in pairs]

    @torch.inference_mode(False)  # what is made here is to be trained
    def load_state(self, named: dict[str, Any], alone: bool) -> None:
        """Replace the state by the named state. Tensors are taken as they are, never cast.

        State that is not in `named` is removed, as Optimizer.load_state_dict does. alone: False if further optimizers
        share the item; state that belongs to no parameter is then left as it is.
        Optimizer.load_state_dict would cast state to its parameter's type, which is not exact.
        An optimizer that overrides it, and hooks, get the indexed state_dict they expect.
        """
        inner, order, given = self.holder, list(self.leaves), self._indexed(named)
        if getattr(inner.load_state_dict, "__func__", None) is not Optimizer.load_state_dict:
            inner.load_state_dict(given)
            return
        for before in inner._optimizer_load_state_dict_pre_hooks.values():
            given = before(inner, given) or given
        for group, options in zip(self.optimizer.param_groups, given["param_groups"], strict=True):
            for option, value in _options(options).items():
                live = group.get(option)
                if isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor) and live.shape == value.shape:
                    live.copy_(value)  # a compiled step holds this very tensor
                else:
                    # Several groups may take over the options of one.
                    group[option] = value.clone() if isinstance(value, torch.Tensor) else value
        for key in [key for key in inner.state if alone or isinstance(key, torch.Tensor)]:
            del inner.state[key]
        self._set_state({order[key] if type(key) is int else key: state for key, state in given["state"].items()})
        # The last steps of Optimizer.load_state_dict: subclasses fill in options that older versions lacked.
        inner.__setstate__({"state": inner.state, "param_groups": inner.param_groups})
        for after in inner._optimizer_load_state_dict_post_hooks.values():
            after(inner)

    def _indexed(self, named: dict[str, Any]) -> dict[str, Any]:
        """The named state as a `state_dict` of torch, with the saved options of each live group."""
        numbers, pairs = count(), zip(self.optimizer.param_groups, self._saved_options(named["groups"]), strict=True)
        packed = [
            {
                **options,
                **{key: names for key, names in group.items() if key == "param_names"},
                "params": list(islice(numbers, len(group["params"]))),
            }
            for group, options in pairs
        ]
        index = {name: i for i, name in enumerate(self.leaves)}
        state = {index.get(name, name): value for name, value in named["state"].items()}
        extra = {key: value for key, value in named.items() if key not in ("state", "groups")}
        return {"state": state, "param_groups": packed, **extra}

    def _set_state(self, named: dict[str, OptimizerState]) -> None:
        for name, state in named.items():
            leaf = self.leaves.get(name)
            if leaf is None or id(leaf.value) not in self._packs:
                kept: dict[Any, OptimizerState] = self.holder.state
                kept[name if leaf is None else leaf.value] = state
        for held in chain(*self.groups):
            pack = self._packs.get(id(held[0].value))
            if pack is not None and (joined := pack.join([named.get(leaf.name, {}) for leaf in held])):
                self.holder.state[pack.parameter] = joined


def state_holder(optimizer: Optimizer) -> Optimizer:
    """The optimizer that keeps the state."""
    zero = _as_zero(optimizer)
    return optimizer if zero is None else cast(Optimizer, zero.optim)


def _as_zero(optimizer: Optimizer) -> Any:
    """The optimizer, if it is a ZeroRedundancyOptimizer; its module is slow to import, and warns."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return optimizer if module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer) else None


def describe_groups(
    optimizer: Optimizer, names: Sequence[Sequence[str]], groups: Sequence[dict[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """The options of each group, the names of its parameters, and the class of the optimizer."""
    kind, groups = _class_of(optimizer), groups or optimizer.param_groups
    return [{"params": n, CLASS: kind, **_options(group)} for n, group in zip(names, groups, strict=True)]


def _class_of(optimizer: Optimizer) -> str:
    return type(state_holder(optimizer)).__name__


def _group_options(
    names: Sequence[str], left: Collection[str], group: dict[str, Any], saved: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """The saved options for a live group, from the saved groups that held its parameters. Parameters that are not
    saved, or left out, take the options of the others."""
    members = set(names).difference(left)
    held = {min(common): _options(one) for one in saved if (common := members & set(one["params"]))}
    if not held:
        return _options(saved[0]) if len(saved) == 1 and not names else _options(group)
    (first, options), *others = held.items()
    for name, other in others:
        for key in {**options, **other}:
            if not (key in options and key in other and _equal(options[key], other[key])):
                raise StateMismatch(
                    f"no saved parameter group holds all of {sorted(members)[:3]} and {max(0, len(members) - 3)} more: "
                    f"{key} was {options.get(key)!r} for {first} and {other.get(key)!r} for {name}",
                    "Groups may be reordered or split between save and restore, and merged where their options agree; "
                    "restore without the optimizer or rebuild its groups as they were; nothing was changed",
                )
    return options


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        return bool(torch.equal(torch.as_tensor(first), torch.as_tensor(second)))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_equal(value, second[key]) for key, value in first.items())
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(_equal, first, second))
    return bool(first == second)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}
