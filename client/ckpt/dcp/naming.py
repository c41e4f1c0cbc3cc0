"""Maps names between DCP and ckpt: checkpoint ids, paths of values, and trees of values. Pure.

DCP flattens nested dicts and lists into values by path, and joins a path with dots into a fully qualified name (FQN).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ckpt.capture.optimizers import CLASS
from ckpt.capture.tensors import small_value
from ckptstore.errors import CorruptObject, InvalidName, UnsupportedObject
from ckptstore.format.documents import JSON
from ckptstore.format.trees import TAG, decode_tree, encode_tree, entry_of, items_of
from ckptstore.names import Reference

Path = tuple[str | int, ...]
"""Keys of dicts and indices of lists, outermost first; the first is the item."""
CheckpointId = str | os.PathLike[str]
"""The name that DCP has for a checkpoint: see `parse_checkpoint_id`."""

_STEP = re.compile(r"(?:.*/)?(?:step[-_=]?)?([0-9]{1,12})/?")


class Value(NamedTuple):
    """A tensor or object of a state dict, and its path."""

    path: Path
    tree: JSON
    """The value as tagged JSON; a tensor names its entry."""

    @property
    def fqn(self) -> str:
        """The name that DCP uses."""
        return ".".join(map(str, self.path))

    @property
    def name(self) -> str:
        """The name that entries and error messages use."""
        return entry_name(self.path)

    @property
    def entry(self) -> str | None:
        """The entry of a tensor; None for an object."""
        return entry_of(self.tree)


def entry_name(path: Path) -> str:
    """The name of the entry at a path."""
    return "/".join(map(str, path))


def parse_checkpoint_id(checkpoint_id: CheckpointId, run: str) -> Reference:
    """The checkpoint that DCP's `checkpoint_id` names; in `run` if the id names no run.

    A step ("1000"), a path that ends in one ("outputs/step-1000"), or an id ("gpt@1000"). Raises InvalidName.
    """
    text = os.fspath(checkpoint_id)
    if "@" in text:
        return Reference.parse(text)
    match = _STEP.fullmatch(text)
    if match is None:
        raise InvalidName(
            f"checkpoint_id {text!r} does not name a step", "Use a step, a path ending in step-1000, or RUN@STEP"
        )
    return Reference(run, int(match[1]))


def flatten(trees: Mapping[str, JSON]) -> Iterator[Value]:
    """The values that DCP's flattening planners find in a state dict, in order. Raises CorruptObject.

    Options of parameter groups that `Checkpointer` saved are listed per parameter, as DCP expects them.
    """
    try:
        for item, tree in trees.items():
            yield from _flatten((item,), _options_by_parameter(tree))
    except RecursionError as error:
        raise CorruptObject("a tree is nested too deep") from error


def is_value(tree: JSON) -> bool:
    """Whether DCP stores an object as a whole instead of flattening it."""
    return [value.path for value in _flatten((), tree)] == [()]


def nest(values: Iterable[Value]) -> dict[str, JSON]:
    """The trees with these values: the inverse of `flatten`, except for empty dicts, which DCP drops.

    Raises UnsupportedObject if one rank has a value where another one has a dict or list.
    """
    root: dict[str | int, Any] = {}
    for value in values:
        node = root
        for depth, key in enumerate(value.path[:-1], 1):
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise _conflict(value.path[:depth])
        if isinstance(node.setdefault(value.path[-1], value), dict):
            raise _conflict(value.path)
    listed = {str(item): _with_lists((item,), node) for item, node in root.items()}
    return {item: encode_tree(node, item, lambda _, value: value.tree) for item, node in listed.items()}


def _flatten(path: Path, tree: JSON) -> Iterator[Value]:
    name = entry_name(path)
    if (pairs := items_of(tree, name)) is not None:
        for key, item in pairs:
            yield from _flatten((*path, str(decode_tree(key, name, small_value))), item)
    elif isinstance(tree, list) and not _stays_whole(tree):
        for index, item in enumerate(tree):
            yield from _flatten((*path, index), item)
    else:
        yield Value(path, tree)


def _options_by_parameter(tree: JSON) -> JSON:
    """{"groups": [{"params": ["w"], "lr": 1}]} becomes {"param_groups.w.lr": 1}; other trees are unchanged."""
    if not _is_optimizer(tree):
        return tree
    options = {
        f"param_groups.{name}.{key}": option
        for group in tree["groups"]
        for name in group["params"]
        for key, option in group.items()
        if key not in ("params", CLASS)  # torch's own names have no class
    }
    return {**{key: value for key, value in tree.items() if key != "groups"}, **options}


def _is_optimizer(tree: JSON) -> bool:
    """Whether a tree looks like an optimizer saved by `Checkpointer`: groups of parameters, and state of some."""
    if not isinstance(tree, dict) or not isinstance(tree.get("state"), dict):
        return False
    groups = tree.get("groups")
    if not isinstance(groups, list) or not all(isinstance(group, dict) and TAG not in group for group in groups):
        return False
    lists = [group.get("params") for group in groups]
    if not all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in lists):
        return False
    return set(tree["state"]) <= {name for names in lists for name in names}


def _stays_whole(items: list[JSON]) -> bool:
    """Whether DCP stores a list as a whole: it flattens only lists that contain tensors or dicts."""
    return all(
        _stays_whole(item) if isinstance(item, list) else entry_of(item) is None and items_of(item, "") is None
        for item in items
    )


def _with_lists(path: Path, node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    items = {key: _with_lists((*path, key), item) for key, item in node.items()}
    indices = [key for key in items if isinstance(key, int)]
    if not indices:
        return items
    if len(indices) < len(items):
        raise _conflict(path)
    # A missing index was an empty dict. If no other element made DCP flatten the list, its last one was an empty dict.
    found = [items.get(index, {}) for index in range(max(indices) + 1)]
    flattened = any(not isinstance(item, Value) or item.entry is not None for item in found)
    return found if flattened else [*found, {}]


def _conflict(path: Path) -> UnsupportedObject:
    return UnsupportedObject(
        f"state at {entry_name(path)!r} has another structure on another rank",
        "Use different keys for state that belongs to one rank only",
    )
