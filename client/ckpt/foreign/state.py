"""Reads torch.save files, and converts nested dicts, as other programs save them, to the form that `ckpt` restores.

No code in a file is executed; tensors are read when they are needed.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from datetime import timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import Struct, field

from ckpt.capture.arrays import byte_view
from ckpt.capture.modules import STATISTICS, canonical
from ckpt.capture.tensors import small_leaf
from ckpt.capture.train_state import MODEL, OPTIMIZER
from ckpt.dtypes import BY_NAME, NAMES
from ckpt.foreign.archive import NumpyArray, NumpyType, Storage, StridedTensor, read_archive
from ckpt.foreign.inert import Budget, LeftOut
from ckpt.foreign.parts import ForeignSlice, ForeignState, Read
from ckptstore.errors import CorruptObject, InvalidRequest, UnsupportedObject
from ckptstore.format.boxes import Box
from ckptstore.format.documents import JSON
from ckptstore.format.shards import Slice
from ckptstore.format.trees import TAG, children, encode_tree, unique, with_records
from ckptstore.values import Value

_RENAMED = {
    "state_dict": MODEL,
    "model_state_dict": MODEL,
    "optimizer": OPTIMIZER,
    "optimizer_state_dict": OPTIMIZER,
    "optim_state_dict": OPTIMIZER,
    "optimizer_0": OPTIMIZER,
}
_WRAPPER = "module."
_NUMBERED = "_by_number"


class Scattered(Value):
    """A tensor stored in several pieces."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[tuple[Box, Read], ...]


_SMALL = with_records(small_leaf)


class _Builder(Struct):
    """Collects the parts and trees of one file."""

    path: str
    foreign: ForeignState = field(default_factory=ForeignState)
    _names: dict[str, None] = {}
    _seen: dict[tuple[object, ...], str] = {}

    def leaf(self, path: str, value: Any) -> JSON:
        if isinstance(value, Scattered):
            name, dtype = unique(path, self._names), self._dtype(path, value.dtype)
            for box, read in value.pieces:
                self.foreign.parts.append(ForeignSlice(Slice(name, dtype, value.shape, box), read))
            return {TAG: "tensor", "name": name}
        if isinstance(value, StridedTensor):
            return {TAG: "tensor", "name": self._tensor(path, value)}
        if isinstance(value, np.ndarray):
            steps = tuple(step // value.itemsize for step in value.strides)
            array = StridedTensor(Storage(byte_view(value).data), BY_NAME[value.dtype.name], value.shape, steps)
            return {TAG: "array", "name": self._tensor(path, array)}
        if isinstance(value, LeftOut):
            raise value.refusal(self.path)
        return _SMALL(path, value)

    def _tensor(self, path: str, tensor: StridedTensor) -> str:
        dtype = self._dtype(path, tensor.dtype)
        if tensor.nbytes > len(tensor.storage.memory):
            # Otherwise a file of a few bytes could expand to any size.
            raise UnsupportedObject(
                f"tensor at {path!r} of {self.path} is larger than its storage", "Save its .contiguous()"
            )
        key = (*tensor.place, dtype, tensor.shape, tensor.strides, tensor.conjugated, tensor.negated)
        name = unique(path, self._names)
        if tensor.nbytes and (first := self._seen.setdefault(key, name)) != name:
            self.foreign.aliases[name] = first
            return first
        try:
            self.foreign.parts.append(ForeignSlice(Slice.whole(name, dtype, tensor.shape), tensor.reader()))
        except ValueError as error:
            raise CorruptObject(f"tensor at {path!r} of {self.path} is damaged: {error}", "Copy it again") from error
        return name

    def _dtype(self, path: str, dtype: torch.dtype) -> str:
        if dtype not in NAMES:
            raise UnsupportedObject(f"{path!r} of {self.path} has type {dtype}", "Convert it to another type")
        return NAMES[dtype]


def to_foreign(state: Any, item: str, path: str, budget: Budget) -> ForeignState:
    """Convert a state to parts and trees. `item` names it unless it is a dict of items.

    budget: what the file was read with; the state is counted as it is stored, with nothing shared.
    Raises InvalidRequest if it is empty, UnsupportedObject for objects that cannot be stored.
    """
    budget.spend_on(state)
    builder, left_out = _Builder(path), dict[str, LeftOut]()
    state = _kept(state, "", left_out)
    seen: set[int] = set()
    for at, one in left_out.items():
        if not at or _has_tensors(one, seen):
            raise one.refusal(path + at)
        builder.foreign.notes.append(f"{at[1:]} is left out: a {one.name} cannot be imported")
    items = _items(state, item)
    if isinstance(items.get(MODEL), Mapping):
        items[MODEL] = _plain_names(items[MODEL], builder.foreign.notes)
    for name, value in items.items():
        state = value if name == MODEL else _unflattened(value)
        state = _optimizer(name, state, items.get(MODEL), builder.foreign.notes)
        stored = f"{name}{_NUMBERED}" if _is_optimizer(state) else name
        builder.foreign.trees[stored] = encode_tree(state, stored, builder.leaf)
    if left_out and not builder.foreign.parts:
        raise next(iter(left_out.values())).refusal(path)
    if not builder.foreign.trees:
        raise InvalidRequest(f"{path} is empty", "Check that it is the right file")
    return builder.foreign


def _kept(value: Any, path: str, left_out: dict[str, LeftOut]) -> Any:
    """The value with arrays of numpy, and without objects that are left out, which are added by their paths. In
    lists and tuples they are None."""
    if isinstance(value, NumpyArray):
        value = value.made
    if isinstance(value, NumpyType | timezone):
        value = LeftOut(type(value).__name__)
    if isinstance(value, LeftOut):
        left_out[path] = value
    elif isinstance(value, dict):
        kept = {_kept(key, f"{path}/key", left_out): _kept(value[key], f"{path}/{key}", left_out) for key in value}
        value = type(value)({key: one for key, one in kept.items() if LeftOut not in (type(key), type(one))})
    elif type(value) in (list, tuple):
        kept_items = [_kept(one, f"{path}/{i}", left_out) for i, one in enumerate(value)]
        value = type(value)(None if type(one) is LeftOut else one for one in kept_items)
    return value


def _has_tensors(value: LeftOut, seen: set[int]) -> bool:
    """seen: objects without any, which this adds to: several may share one."""
    todo: list[Any] = [value]
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, StridedTensor | Storage):
            return True
        todo += one.parts if isinstance(one, LeftOut) else [child for _, child in children(one) or ()]
    return False


def _items(state: Any, item: str) -> dict[str, Any]:
    """The items of a state: a dict without tensors at the top level is a dict of items; other states are one item."""
    if not isinstance(state, dict) or not all(type(key) is str for key in state):
        return {item: state}
    if any(isinstance(value, StridedTensor | Scattered) for value in state.values()):
        return {item: dict(state)}
    names = [_RENAMED.get(str(key), str(key)) for key in state]
    if len(set(names)) < len(names):
        names = list(state)
    # state_dict returns OrderedDicts; a dict holds the same information.
    return {name: dict(v) if isinstance(v, dict) else v for name, v in zip(names, state.values(), strict=True)}


def _plain_names(model: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Parameters by their names in the module without wrappers."""
    plain = {canonical(key): value for key, value in model.items() if isinstance(key, str)}
    if len(plain) < len(model):
        return dict(model)
    if plain and all(key.startswith(_WRAPPER) for key in plain):
        plain = {key.removeprefix(_WRAPPER): value for key, value in plain.items()}
    if list(plain) != list(model):
        notes.append(
            "the prefixes of wrappers (module., _orig_mod.) were removed from the names of the model's parameters"
        )
    return plain


def _unflattened(value: Any) -> Any:
    """Unflatten an optimizer with keys state.<parameter>.<key> and param_groups.<parameter>.<option>.

    Other values are returned unchanged.
    """
    if not isinstance(value, dict) or not value:
        return value
    tree: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}}
    for key in value:
        part, _, rest = str(key).partition(".")
        name, _, last = rest.rpartition(".")
        if part not in tree or not name:
            return value
        tree[part].setdefault(name, {})[last] = value[key]
    groups: dict[str, dict[str, Any]] = {}
    for name, options in tree["param_groups"].items():
        groups.setdefault(repr(sorted(options.items())), {**options, "params": []})["params"].append(name)
    return {"state": tree["state"], "param_groups": list(groups.values())}


def _is_optimizer(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("state", {}), dict)
        and isinstance(value.get("param_groups"), list)
        and all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in value["param_groups"])
    )


def _optimizer(item: str, state: Any, model: Any, notes: list[str]) -> Any:
    """An optimizer's state by parameter name, as `restore` expects it.

    Other states are returned unchanged, and so are optimizers whose parameter names are unknown.
    """
    if not _is_optimizer(state):
        return state
    groups, states = state["param_groups"], state.get("state", {})
    names = _names_of(groups, states, model)
    if names is None:
        notes.append(
            f"{item} is stored by parameter number, as {item}{_NUMBERED}: the file has no parameter names. "
            f"Restore it with {item}{_NUMBERED}=None and pass the value to load_state_dict"
        )
        return state
    extra = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
    return {
        "state": {names.get(key, key): value for key, value in states.items()},
        "groups": [
            {
                "params": [names[parameter] for parameter in group["params"]],
                **{key: value for key, value in group.items() if key not in ("params", "param_names")},
            }
            for group in groups
        ],
        **extra,
    }


def _names_of(groups: list[dict[str, Any]], state: dict[Any, Any], model: Any) -> dict[Any, str] | None:
    """The name of each parameter in the groups; None if the names are unknown."""
    keys = [key for group in groups for key in group["params"]]
    if all(isinstance(key, str) for key in keys):
        return {key: key for key in keys}
    if all(len(group.get("param_names") or ()) == len(group["params"]) for group in groups):
        return {key: name for group in groups for key, name in zip(group["params"], group["param_names"], strict=True)}
    if len(groups) > 1 or not isinstance(model, Mapping):
        return None  # several groups rarely follow the order of the model
    parameters = _parameters(model)
    if len(parameters) != len(keys):
        return None
    names = dict(zip(keys, parameters, strict=True))
    fits = all(_fits(state.get(key, {}), parameters[name]) for key, name in names.items())
    return names if fits else None


def _parameters(model: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter, in the module's order, without well-known buffers and integers; tied ones once."""
    found: dict[str, tuple[int, ...]] = {}
    seen: set[object] = set()
    for name, value in model.items():
        if not isinstance(value, StridedTensor | Scattered) or not value.dtype.is_floating_point:
            continue
        if name.rpartition(".")[2] in STATISTICS or (isinstance(value, StridedTensor) and value.place in seen):
            continue
        if isinstance(value, StridedTensor) and value.nbytes:
            seen.add(value.place)
        found[name] = tuple(value.shape)
    return found


def _fits(state: Any, shape: tuple[int, ...]) -> bool:
    """Whether the state of one parameter has the parameter's shape; scalars always fit."""
    tensors: Iterable[Any] = state.values() if isinstance(state, dict) else ()
    shapes = {tuple(t.shape) for t in tensors if isinstance(t, StridedTensor | Scattered)}
    return shapes <= {shape, ()}


_MOST = 1 << 28
"""Units of a Budget: ten million numbers in lists, or a million tensors. Larger states hold them as tensors."""


def read_file(path: Path, budget: Budget) -> Any:
    """The state in a file of torch.save; raises as read_archive."""
    return read_archive(map_file(path), str(path), budget)


def map_file(path: Path) -> memoryview:
    """The bytes of a file, mapped: they take no memory of this process. Raises OSError."""
    with open(path, "rb") as file:
        if not file.read(1):
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def read_torch(path: Path, item: str) -> ForeignState:
    """The state in a file. `item` names it unless it is a dict of items.

    Raises UnsupportedObject if it needs code to be executed, is compressed, or repeats objects until its state is far
    larger than the file; CorruptObject if it is damaged or truncated.
    """
    budget = Budget(str(path), _MOST)
    return to_foreign(read_file(path, budget), item, str(path), budget)
