from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from ckpt.dcp.naming import Value, flatten, nest
from ckptstore.errors import CorruptObject, UnsupportedObject
from ckptstore.format.documents import JSON
from ckptstore.format.trees import encode_tree

KEYS = st.text("ab.$", min_size=1, max_size=3)
VALUES = st.one_of(st.none(), st.integers(0, 9), st.just(torch.zeros(1)))
STATES = st.dictionaries(
    KEYS,
    st.recursive(VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3)),
    max_size=3,
)


def as_trees(state: dict[str, Any]) -> dict[str, JSON]:
    return {
        item: encode_tree(value, item, lambda path, _: {"$": "tensor", "name": path}) for item, value in state.items()
    }


@given(STATES)
def test_values_are_those_that_torch_finds_and_nest_puts_them_back(state: dict[str, Any]) -> None:
    try:
        _, paths = flatten_state_dict(state)
    except ValueError:  # two values of one name
        assume(False)
    values = list(flatten(as_trees(state)))
    assert ({value.fqn: value.path for value in values}, list(flatten(nest(values)))) == (paths, values)


def test_optimizers_of_checkpointer_have_options_by_parameter() -> None:
    tree = {"state": {"w": {"step": 1}}, "groups": [{"params": ["w", "b"], "lr": 0.1}]}
    assert [value.fqn for value in flatten({"optim": tree})] == [
        "optim.state.w.step", "optim.param_groups.w.lr", "optim.param_groups.b.lr",
    ]  # fmt: skip


@pytest.mark.parametrize(("first", "second"), [(("a",), ("a", "b")), (("a", "b"), ("a",)), (("a", 0), ("a", "b"))])
def test_ranks_that_disagree_about_the_structure(first: tuple[Any, ...], second: tuple[Any, ...]) -> None:
    with pytest.raises(UnsupportedObject, match="state at 'a' has another structure on another rank"):
        nest([Value(first, 1), Value(second, 2)])


@pytest.mark.parametrize("pairs", [None, 5, [1], [[1]], [[1, 2, 3]], [[{"$": "size"}, 1]]])
def test_malformed_dicts_of_a_hostile_manifest(pairs: Any) -> None:
    with pytest.raises(CorruptObject):
        list(flatten({"a": {"$": "dict", "v": pairs}}))


def test_a_tree_without_end() -> None:
    tree: Any = 1
    for _ in range(5000):
        tree = {"a": tree}
    with pytest.raises(CorruptObject, match="nested too deep"):
        list(flatten({"a": tree}))
