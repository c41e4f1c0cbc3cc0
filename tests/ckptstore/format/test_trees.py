"""Tagged trees give back plain values exactly, types included, and refuse all else by path."""

from __future__ import annotations

import contextlib
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from functools import reduce
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckptstore.errors import CorruptObject, UnsupportedObject
from ckptstore.format.trees import decode_tree, encode_tree, leaves, merge_trees, unsupported


class Weird:
    """Stands for any class that only pickle could store."""


class Text(str):
    """A subclass, which must not silently become its base."""


def refuse(path: str, value: object) -> Any:
    raise unsupported(path, value)


def unknown(path: str, tree: dict[str, Any]) -> Any:
    raise CorruptObject(f"{path}: unknown tag {tree.get('$')!r}")


def through_json(value: Any) -> Any:
    return decode_tree(msgspec.json.decode(msgspec.json.encode(encode_tree(value, "s", refuse))), "s", unknown)


def same(a: Any, b: Any) -> bool:
    """Equal in value, type and order, bit by bit for floats."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(k, m) and same(v, w) for (k, v), (m, w) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


HASHABLE = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(), st.binary(), st.floats(allow_nan=False),
    st.integers(min_value=10**4000, max_value=10**4200),
    st.complex_numbers(allow_nan=False),
)  # fmt: skip
KEYS = st.recursive(HASHABLE, lambda inner: st.tuples(inner, inner), max_leaves=3)
VALUES = st.recursive(
    st.one_of(HASHABLE, st.floats(), st.complex_numbers(), st.sets(HASHABLE), st.frozensets(HASHABLE)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=4) | st.just("$") | st.just("$x"), inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
        st.dictionaries(KEYS, st.integers(), max_size=3).map(Counter),
    ),
    max_leaves=12,
)


@given(VALUES)
@example({"$": "tuple", "v": [1]})
@example([-0.0, 0.0, 1e-320, float("nan"), float("inf"), complex(float("nan"), -0.0)])
@example([2**53 - 1, 2**53, -(2**53), 2**64, 10**5000, -(10**5000)])
@example(((), [], {}, set(), frozenset(), OrderedDict(), Counter(), b"", "", {(): {b"": None}}))
def test_values_come_back_exactly(value: Any) -> None:
    assert same(through_json(value), value)


@pytest.mark.parametrize(
    ("state", "path"),
    [
        ({"a": [1, {"b": Weird()}]}, "'s/a/1/b'"), ({"a": (1, Weird())}, "'s/a/1'"), ({3: Weird()}, "'s/3'"),
        ({Weird(): 3}, "'s/key'"), ([Text("x")], "'s/0'"), ({"a": {Text("x"): 1}}, "'s/a/key'"), ([object], "'s/0'"),
        ([bytearray(b"x")], "'s/0'"), ({"name": "half a pair: \ud800"}, "'s/name'"),
        ({"half a pair: \ud800": 1}, "'s'"), ([datetime(2026, 1, 2, fold=1)], "'s/0'"),
        ([datetime(2026, 1, 2, tzinfo=ZoneInfo("UTC"))], "'s/0'"),
        ([datetime(2026, 1, 2, tzinfo=timezone(timedelta(0), "X"))], "'s/0'"),
    ],
)  # fmt: skip
def test_what_cannot_be_stored_is_named_by_its_path(state: Any, path: str) -> None:
    with pytest.raises(UnsupportedObject) as caught:
        encode_tree(state, "s", refuse)
    assert path in str(caught.value)
    assert caught.value.hint
    assert isinstance(caught.value, TypeError)


def test_a_value_that_contains_itself() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UnsupportedObject, match="contain itself"):
        encode_tree(loop, "s", refuse)


def within(outer: Callable[[Any], Any], depth: int) -> Any:
    return reduce(lambda inner, _: outer(inner), range(depth), {})


def nested(depth: int) -> Any:
    return within(lambda inner: {0: inner}, depth)  # an odd key: the deepest JSON per level


def test_the_deepest_value_that_can_be_stored_can_be_read() -> None:
    assert through_json(nested(100)) == nested(100)
    assert list(leaves(encode_tree(nested(100), "s", refuse), "s")) == []
    with pytest.raises(UnsupportedObject):
        encode_tree(nested(101), "s", refuse)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["v", "$", "x"]), inner, max_size=3)
        | st.builds(
            lambda tag, v: {"$": tag, "v": v},
            st.sampled_from(
                ["tuple", "set", "frozenset", "dict", "odict", "counter", "int", "float", "complex", "bytes", "tensor"]
            ),
            inner,
        )
    ),
    max_leaves=10,
)


@given(JSON_VALUES)
@example({"$": "counter", "v": [["a", "b"]]})
def test_hostile_trees_raise_corrupt_object_only(tree: Any) -> None:
    for read in (lambda: decode_tree(tree, "s", unknown), lambda: list(leaves(tree, "s"))):
        with contextlib.suppress(CorruptObject):
            read()


@pytest.mark.parametrize(
    ("tag", "v"),
    [
        ("set", [[]]), ("dict", [[[], 1]]), ("dict", [[1]]), ("dict", {"a": 1}), ("odict", 5),
        ("float", 10**400), ("complex", []), ("complex", [{}, 1]), ("int", "0xzz"),
        ("int", 1.5), ("bytes", "not base64!"), ([], None), ("tuple", ...), ("datetime", "yesterday"), ("path", 3),
        ("timedelta", ["x"]), ("namedtuple a.B", [["not a name", 1]]), ("namedtuple a.__import__('os')", [["x", 1]]),
        ("namedtuple", [["x", 1]]), ("dataclass a.B", [[1, 2]]), ("dataclass a.B", [1]),
    ],
)  # fmt: skip
def test_malformed_values_are_refused(tag: Any, v: Any) -> None:
    words = tag.split() if isinstance(tag, str) else [tag]
    tree = {"$": words[0]} | ({} if v is ... else {"v": v}) | ({"name": words[1]} if words[1:] else {})
    with pytest.raises(CorruptObject):
        decode_tree(tree, "s", unknown)
    with contextlib.suppress(CorruptObject):
        list(leaves(tree, "s"))


def test_trees_too_deep_to_walk() -> None:
    tree = within(lambda inner: [inner], 900)
    for read in (lambda: decode_tree(tree, "s", unknown), lambda: list(leaves(tree, "s"))):
        with pytest.raises(CorruptObject, match="nested"):
            read()


def test_leaves_are_found_under_the_paths_that_captured_them() -> None:
    def leaf(path: str, value: object) -> Any:
        assert isinstance(value, Weird)
        return {"$": "tensor", "name": path}

    state = {"a": [Weird(), {"b": (1, Weird())}], "c": {0: Weird(), "$": OrderedDict(x=Weird())}}
    found = list(leaves(encode_tree(state, "s", leaf), "s"))
    assert [path for path, _ in found] == [tagged["name"] for _, tagged in found]
    assert [path for path, _ in found] == ["s/a/0", "s/a/1/b/1", "s/c/0", "s/c/$/x"]
    record = {"$": "dataclass", "name": "a.B", "v": [["w", {"$": "tensor", "name": "s/w"}]]}
    assert [leaf["name"] for _, leaf in leaves(record, "s")] == ["s/w"]


# What several ranks say of one item.

PLAIN = st.none() | st.booleans() | st.integers(0, 2) | st.sampled_from(["", "a", 1.0])
SAID = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
        | st.dictionaries(st.sampled_from([0, 1, "a", True]), inner, max_size=3).map(OrderedDict)
        | st.tuples(inner)
    ),
    max_leaves=8,
)


def paths(tree: Any, path: str = "") -> list[str]:
    """Every leaf with its path; what lists hold counts without its place."""
    if isinstance(tree, list):
        return sorted(found for item in tree for found in paths(item, f"{path}/[]"))
    if isinstance(tree, dict) and tree.get("$") in ("dict", "odict", "counter"):
        return sorted(found for key, item in tree["v"] for found in paths(item, f"{path}/{key!r}"))
    if isinstance(tree, dict) and "$" not in tree:
        return sorted(found for key, item in tree.items() for found in paths(item, f"{path}/{key!r}"))
    return [f"{path}={msgspec.json.encode(tree)!r}"]


def merged(trees: list[Any]) -> Any:
    """The merge from left to right, or None if the trees disagree."""
    try:
        return reduce(lambda a, b: merge_trees(a, b, "s"), trees)
    except CorruptObject:
        return None


@given(st.lists(SAID, min_size=3, max_size=3))
def test_the_ranks_values_are_joined_or_refused(values: list[Any]) -> None:
    trees = [encode_tree(value, "s", refuse) for value in values]
    before, whole = msgspec.json.encode(trees), merged(trees)
    assert msgspec.json.encode(trees) == before, "receipts stay as they are"
    right = merged(trees[1:])
    if whole is None:
        return
    assert set(paths(whole)) == {leaf for tree in trees for leaf in paths(tree)}, "nothing is lost, nothing is made up"
    assert right is not None
    assert msgspec.json.encode(merge_trees(trees[0], right, "s")) == msgspec.json.encode(whole), "however grouped"


def test_pipeline_stages_make_one_optimizer() -> None:
    stages: list[Any] = [
        {"state": {f"layer{i}": {"step": 3}}, "groups": [{"params": [f"layer{i}"], "lr": 0.1}], "scale": 1.0}
        for i in range(3)
    ]
    assert merged(stages) == {
        "state": {f"layer{i}": {"step": 3} for i in range(3)},
        "groups": [group for stage in stages for group in stage["groups"]],
        "scale": 1.0,
    }


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (1, 2), (1, True), (1, 1.0), (1, [1]), ({}, None), ("", {}), ([], {}),
        ({"$": "tuple", "v": [1]}, {"$": "tuple", "v": [2]}),
        ({"$": "odict", "v": []}, {"$": "counter", "v": []}),
        ({"$": "odict", "v": []}, {"a": 1}),
        ({"$": "tensor", "name": "a"}, {"$": "tensor", "name": "b"}),
        ({"$": "dict", "v": [[1]]}, {"$": "dict", "v": []}),
        ({"$": "dict"}, {"$": "dict", "v": []}),
        ({"$": "dict", "v": 3}, {"a": 1}),
    ],
)  # fmt: skip
def test_ranks_that_disagree_are_refused(first: Any, second: Any) -> None:
    for a, b in ((first, second), (second, first)):
        with pytest.raises(CorruptObject, match=r"s/deep/x"):
            merge_trees({"deep": {"x": a}}, {"deep": {"x": b}}, "s")


def test_the_device_of_a_tensor_is_not_worth_a_quarrel() -> None:
    first, second = ({"$": "tensor", "name": "a", "device": device} for device in ("cuda", "cpu"))
    assert merge_trees(first, second, "s") == first


def test_many_odd_keys_and_deep_trees_are_merged_in_bounds() -> None:
    pairs = [[i, i] for i in range(75_000)]
    first: Any = {"$": "dict", "v": pairs[:50_000]}
    second: Any = {"$": "dict", "v": pairs[25_000:]}
    assert merge_trees(first, second, "s") == {"$": "dict", "v": pairs}
    deep = within(lambda inner: {"a": inner}, 900)
    with pytest.raises(CorruptObject, match="nested"):
        merge_trees(deep, deep, "s")
