"""Lossless conversion of plain Python values to tagged JSON and back. No pickle, no torch, no I/O.

None, booleans, strings, integers below 2**53, finite floats, lists and dicts with plain string keys map to the same
JSON values. Everything else is an object whose key "$" names its type:

    {"$": "tuple", "v": [...]}        {"$": "set" | "frozenset", "v": [...]}
    {"$": "dict", "v": [[k, v]...]}   any other keys, or a key that begins with "$"; may have further fields
    {"$": "dict", "class": ..., ...}  what the caller makes of a dict
    {"$": "odict" | "counter", "v": [[k, v]...]}   OrderedDict, Counter
    {"$": "int", "v": "-0x1f..."}     {"$": "float", "v": "nan" | "inf" | "-inf"}
    {"$": "complex", "v": [re, im]}   {"$": "bytes", "v": "<base64>"}
    {"$": "path" | "datetime" | "date", "v": "..."}   {"$": "timedelta", "v": [days, seconds, microseconds]}
    {"$": "namedtuple" | "dataclass", "name": "module.Class", "v": [[field, v]...]}
    {"$": "tensor" | "array", ...}    a leaf stored in a shard ("name") or inline ("dtype", "shape", "data")
    {"$": <other>, ...}               a leaf of the caller
"""

from __future__ import annotations

import base64
import math
import sys
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from datetime import date, datetime, timedelta
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from ckptstore.errors import CorruptObject, UnsupportedObject
from ckptstore.format.documents import JSON

_SAFE_INT = 1 << 53
_MAX_DEPTH = 100
_MAX_JSON_DEPTH = 2 * _MAX_DEPTH + 2  # a mapping with other keys is two levels of JSON
TAG = "$"

EncodeLeaf = Callable[[str, Any], JSON]
"""Converts (path, object) to JSON, for types that this module does not handle; may raise UnsupportedObject."""
Unleaf = Callable[[str, dict[str, Any]], Any]
"""Converts (path, tagged object) to a value, for tags that this module does not handle."""


def unsupported(path: str, value: object) -> UnsupportedObject:
    """The error for a leaf that cannot be stored."""
    kind = type(value)
    return UnsupportedObject(
        f"state at {path!r} is a {kind.__module__}.{kind.__qualname__}, which cannot be stored without pickle",
        "Convert it to numbers, strings, lists, dicts, tensors or arrays. Only objects passed by a keyword of their "
        "own are asked for a state_dict: pass this one so, or have the state_dict of the object that holds it give "
        "the state_dict of this one",
    )


def encode_tree(value: Any, path: str, leaf: EncodeLeaf, depth: int = 0) -> JSON:
    """`value` as tagged JSON. `leaf` converts all other types; subclasses are not converted to their base types."""
    _check_nesting(depth, path)
    kind = type(value)
    if value is None:
        return value
    if kind in _TEXTS:
        return _TEXTS[kind](value, path)
    if kind in _SCALARS:
        return _SCALARS[kind](value)

    def child(key: object, item: Any) -> JSON:
        if type(item) in _SCALARS and depth < _MAX_DEPTH:  # most leaves: a path need not be made for them
            return _SCALARS[type(item)](item)
        return encode_tree(item, f"{path}/{key}", leaf, depth + 1)

    if kind is list:
        # Names of parameters are many.
        texts = set(map(type, value)) == {str}
        return [_text(item, path) for item in value] if texts else [child(i, item) for i, item in enumerate(value)]
    if kind in (tuple, set, frozenset):
        return {TAG: kind.__name__, "v": [child(i, item) for i, item in enumerate(value)]}
    if kind is dict and all(type(key) is str for key in value):
        return mapping({_text(key, path): child(key, item) for key, item in value.items()})
    if kind in _MAPPINGS:
        return {TAG: _MAPPINGS[kind], "v": [[child("key", key), child(key, item)] for key, item in value.items()]}
    return leaf(path, value)


def with_records(leaf: EncodeLeaf) -> EncodeLeaf:
    """A leaf that also converts paths, and named tuples and dataclasses by their fields; `leaf` converts the rest."""

    def record_or_leaf(path: str, value: Any) -> JSON:
        if isinstance(value, Path):
            return {TAG: "path", "v": _text(str(value), path)}
        if (names := field_names(value)) is None:
            return leaf(path, value)
        _check_nesting(path.count("/"), path)
        pairs = [[name, encode_tree(getattr(value, name), f"{path}/{name}", record_or_leaf)] for name in names]
        tag, kind = "namedtuple" if isinstance(value, tuple) else "dataclass", type(value)
        return {TAG: tag, "name": f"{kind.__module__}.{kind.__qualname__}", "v": pairs}

    return record_or_leaf


def _check_nesting(depth: int, path: str) -> None:
    if depth > _MAX_DEPTH:
        raise UnsupportedObject(f"state at {path!r} is nested more than {_MAX_DEPTH} deep", "Does it contain itself?")


def mapping(items: dict[str, JSON], **fields: JSON) -> JSON:
    """A tree of a dict whose values are trees. fields: what else is known of it."""
    if fields or any(key.startswith(TAG) for key in items):
        return {TAG: "dict", "v": [[key, item] for key, item in items.items()], **fields}
    return items


def decode_tree(tree: JSON, path: str, unleaf: Unleaf, depth: int = 0) -> Any:
    """The inverse of `encode_tree`. Raises CorruptObject if the JSON is not a tagged tree."""
    _check_depth(depth, path)

    def child(key: object, item: JSON, deeper: int = 1) -> Any:
        return decode_tree(item, f"{path}/{key}", unleaf, depth + deeper)

    if isinstance(tree, list):
        return [child(i, item) for i, item in enumerate(tree)]
    if not isinstance(tree, dict):
        return tree
    if TAG not in tree:
        return {key: child(key, item) for key, item in tree.items()}
    tag = tree[TAG]
    try:
        if tag in _RECORDS:
            return _record(tag, tree["name"], {name: child(name, item) for name, item in tree["v"]})
        if tag in _CONTAINERS:
            made = _CONTAINERS[tag](_elements(tag, tree["v"], child))
            return unleaf(path, {**tree, "v": made}) if "class" in tree else made
        if tag in _ATOMS:
            return _ATOMS[tag](tree["v"])
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise CorruptObject(f"tree at {path!r} holds a malformed {tag!r}: {error}") from error
    return unleaf(path, tree)


def _elements(tag: str, items: Any, child: Callable[..., Any]) -> list[Any]:
    """The elements of a container, or the pairs of keys and values of a mapping."""
    if tag not in _MAPPINGS.values():
        return [child(i, item) for i, item in enumerate(items)]
    found = []
    for encoded, item in items:
        key = child("key", encoded, deeper=2)
        found.append((key, child(key, item, deeper=2)))
    return found


def merge_trees(first: JSON, second: JSON, path: str, depth: int = 0) -> JSON:
    """Merge the trees of two ranks: dicts are joined by key, lists are concatenated, all other values must be equal.

    Raises CorruptObject if the ranks disagree or a dict is malformed.
    """
    _check_depth(depth, path)
    if isinstance(first, list) and isinstance(second, list):
        return first + second
    ours, theirs = _pairs(first, path), _pairs(second, path)
    if ours is None or theirs is None or first.get(TAG, "dict") != second.get(TAG, "dict"):
        if _without_device(first) != _without_device(second):
            raise CorruptObject(f"two ranks disagree about the state at {path!r}")
        return first
    for name, (key, value) in theirs.items():
        merged = merge_trees(ours[name][1], value, f"{path}/{key}", depth + 1) if name in ours else value
        ours[name] = (key, merged)
    if TAG not in first and TAG not in second:
        return dict(ours.values())
    fields = merge_trees(_fields(first), _fields(second), path, depth + 1)
    return {TAG: first.get(TAG, "dict"), "v": [list(pair) for pair in ours.values()], **fields}


def _fields(tree: dict[str, JSON]) -> JSON:
    return {key: field for key, field in tree.items() if key not in (TAG, "v")} if TAG in tree else {}


def items_of(tree: JSON, path: str) -> list[tuple[JSON, JSON]] | None:
    """Trees of the keys and values of a dict, in both of its encodings; None for other values. Raises CorruptObject."""
    if not isinstance(tree, dict):
        return None
    if TAG not in tree:
        return list(tree.items())
    if tree[TAG] not in _MAPPINGS.values():
        return None
    try:
        return [(key, value) for key, value in tree["v"]]
    except (LookupError, TypeError, ValueError) as error:
        raise CorruptObject(f"tree at {path!r} holds a malformed {tree[TAG]!r}: {error}") from error


def entry_of(tree: JSON) -> str | None:
    """The entry of a tensor that is stored in a shard; None for other values."""
    name = tree.get("name") if isinstance(tree, dict) and tree.get(TAG) == "tensor" else None
    return name if isinstance(name, str) else None


def _pairs(tree: JSON, path: str) -> dict[bytes, tuple[JSON, JSON]] | None:
    """Keys and values of a dict by the JSON text of the key; None for other values."""
    found = items_of(tree, path)
    return None if found is None else {msgspec.json.encode(pair[0]): pair for pair in found}


def _without_device(leaf: JSON) -> bytes:
    """The JSON text of a leaf, for comparison: in Python, 1 equals True and 1.0."""
    kept = {key: value for key, value in leaf.items() if key != "device"} if isinstance(leaf, dict) else leaf
    return msgspec.json.encode(kept)


def leaves(tree: JSON, path: str, depth: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    """(path, tagged object) of each tensor and array in a tree, in order. Raises CorruptObject like decode_tree."""
    _check_depth(depth, path)
    if isinstance(tree, list):
        for i, item in enumerate(tree):
            yield from leaves(item, f"{path}/{i}", depth + 1)
    elif isinstance(tree, dict):
        if tree.get(TAG) in ("tensor", "array"):
            yield path, tree
        elif TAG in tree:
            yield from _tagged_leaves(tree, path, depth)
        else:
            for key, item in tree.items():
                yield from leaves(item, f"{path}/{key}", depth + 1)


def _tagged_leaves(tree: dict[str, Any], path: str, depth: int) -> Iterator[tuple[str, dict[str, Any]]]:
    items = tree.get("v")
    if not isinstance(items, list):
        return
    if tree[TAG] not in _MAPPINGS.values() and tree[TAG] not in _RECORDS:
        yield from leaves(items, path, depth + 1)
        return
    for pair in items:
        if not isinstance(pair, list) or len(pair) != 2:
            raise CorruptObject(f"tree at {path!r} holds a malformed {tree[TAG]!r}")
        yield from leaves(pair[1], f"{path}/{pair[0]}", depth + 2)


def in_types_of(template: Any, value: Any) -> Any:
    """A decoded value with its named tuples and dataclasses in the types that `template` has in their places.

    Where the template has no object with the same fields, they are of the class that was saved if that is loaded.
    Otherwise a named tuple is one of a type made for it, and a dataclass is a SimpleNamespace: no name in a checkpoint
    leads to an import.
    """
    names = field_names(template)
    if names is not None and names == field_names(value):
        made = [in_types_of(getattr(template, name), getattr(value, name)) for name in names]
        return _with_fields(template, names, made)
    if type(template) is dict and type(value) is dict:
        return {key: in_types_of(template.get(key), item) for key, item in value.items()}
    if type(template) is type(value) and type(value) in (list, tuple) and len(template) == len(value):
        return type(value)(map(in_types_of, template, value))
    return value


def _with_fields(template: Any, names: Iterable[str], values: Iterable[Any]) -> Any:
    """One of the template's type, or of a class. No constructor is called: it may take other arguments, or change a
    field."""
    kind = template if isinstance(template, type) else type(template)
    if issubclass(kind, tuple):
        return tuple.__new__(kind, values)
    made = object.__new__(kind) if kind is template else copy(template)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)  # also of a frozen one
    return made


def field_names(value: Any) -> list[str] | None:
    """The fields of a named tuple, a dataclass, or what stands for one; None for other values."""
    if isinstance(value, tuple):
        return list(value._fields) if hasattr(value, "_fields") else None
    if isinstance(value, SimpleNamespace):
        return list(vars(value))
    return [one.name for one in fields(value)] if is_dataclass(value) and not isinstance(value, type) else None


def children(value: Any) -> list[tuple[object, Any]] | None:
    """The contents of a container, by key, index or field; None for a leaf."""
    if (names := field_names(value)) is not None:
        return [(name, getattr(value, name)) for name in names]
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, (list, tuple)) else None


def value_leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """(path, leaf) of everything in a value that is no container; the paths are those of `decode_tree`."""
    within = children(value)
    if within is None:
        yield path, value
    for key, child in within or ():
        yield from value_leaves(child, f"{path}/{key}")


def unique(path: str, names: MutableMapping[str, Any]) -> str:
    """Add a name that is not in use, and return it: a dict may hold both 1 and "1", whose paths are equal."""
    name, count = path, 1
    while name in names:
        count += 1
        name = f"{path}#{count}"
    names[name] = None
    return name


def _record(tag: str, name: str, values: dict[str, Any]) -> Any:
    module, _, last = name.rpartition(".")
    kind = getattr(sys.modules.get(module), "__dict__", {}).get(last)  # imports nothing
    if isinstance(kind, type) and _class_fields(kind) == list(values):
        return _with_fields(kind, values, values.values())
    return SimpleNamespace(**values) if tag == "dataclass" else _named_tuple(last, tuple(values))(**values)


def _class_fields(kind: type) -> list[str] | None:
    """The fields of a class whose objects are nothing but them."""
    if issubclass(kind, tuple):
        return list(getattr(kind, "_fields", ()))
    return [one.name for one in fields(kind)] if is_dataclass(kind) and kind.__new__ is object.__new__ else None


@cache
def _named_tuple(name: str, names: tuple[str, ...]) -> Any:
    return namedtuple(name, names)  # raises ValueError for what is no identifier


def _check_depth(depth: int, path: str) -> None:
    if depth > _MAX_JSON_DEPTH:
        raise CorruptObject(f"tree at {path[:80]!r}... is nested more than {_MAX_JSON_DEPTH} deep")


def encode_bytes(data: bytes | bytearray | memoryview) -> str:
    """Base64 text of `data`."""
    return base64.b64encode(data).decode("ascii")


def decode_bytes(text: str) -> bytes:
    """The inverse of `encode_bytes`. Raises ValueError."""
    return base64.b64decode(text, validate=True)


def _text(value: str, path: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UnsupportedObject(
            f"state at {path!r} holds text that is not Unicode: {value[:80]!r}", "Store it as bytes (os.fsencode)"
        ) from error
    return value


def _same_zone(value: datetime, path: str) -> JSON:
    text = value.isoformat()
    if repr(datetime.fromisoformat(text)) != repr(value):
        raise UnsupportedObject(
            f"the datetime at {path!r} has a named time zone or a fold", "Store value.astimezone(timezone.utc)"
        )
    return {TAG: "datetime", "v": text}


def _int(value: int) -> JSON:
    # Hexadecimal, because Python limits the digits of decimal conversions.
    return value if -_SAFE_INT < value < _SAFE_INT else {TAG: "int", "v": hex(value)}


def _float(value: float) -> JSON:
    # JSON has no nan and inf. NaN payloads are only kept in tensors and arrays.
    return value if math.isfinite(value) else {TAG: "float", "v": str(value)}


def _real(value: JSON) -> float:
    return float(value["v"]) if isinstance(value, dict) else float(value)


_SCALARS: dict[type, Callable[[Any], JSON]] = {
    bool: bool,
    int: _int,
    float: _float,
    complex: lambda value: {TAG: "complex", "v": [_float(value.real), _float(value.imag)]},
    bytes: lambda value: {TAG: "bytes", "v": encode_bytes(value)},
    date: lambda value: {TAG: "date", "v": value.isoformat()},
    timedelta: lambda value: {TAG: "timedelta", "v": [value.days, value.seconds, value.microseconds]},
}
_TEXTS: dict[type, Callable[[Any, str], JSON]] = {str: _text, datetime: _same_zone}
_RECORDS = ("namedtuple", "dataclass")
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "odict", Counter: "counter"}
_CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
    "odict": OrderedDict,
    "counter": lambda items: Counter(dict(items)),
}
_ATOMS: dict[str, Callable[[Any], Any]] = {
    "int": lambda v: int(v, 16),
    "float": float,
    "complex": lambda v: complex(_real(v[0]), _real(v[1])),
    "bytes": decode_bytes,
    "path": Path,
    "datetime": datetime.fromisoformat,
    "date": date.fromisoformat,
    "timedelta": lambda v: timedelta(*v),
}
