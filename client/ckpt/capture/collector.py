"""Collecting the leaves of values: arrays that go into the shard, small values that go into a tree. No torch.

Nothing is copied here: leaves alias live memory until they are staged.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ckpt.capture.arrays import (
    ArrayPart,
    array_bytes,
    array_fields,
    array_part,
    inline_array,
    is_array,
    is_distributed,
    is_template,
    loaded_jax,
    numpy_type,
)
from ckpt.capture.leaves import Captured, Change
from ckpt.capture.ownership import Ownership
from ckpt.lazily import is_tensor
from ckptstore.codecs.dtypes import NUMPY
from ckptstore.errors import CorruptObject, UnsupportedObject
from ckptstore.format.documents import JSON
from ckptstore.format.shards import Slice
from ckptstore.format.trees import (
    TAG,
    decode_bytes,
    encode_bytes,
    encode_tree,
    merge_trees,
    unique,
    unsupported,
    with_records,
)

if TYPE_CHECKING:
    import torch

RANK_PREFIX = "rank-"
INLINE_BYTES = 64 << 10
"""Rank-local arrays up to this size lie in the receipt, so that a rank without other state writes no shard."""


def rank_prefix(rank: int) -> str:
    """Begins the names of the entries that a rank has for itself."""
    return f"{RANK_PREFIX}{rank:05d}/"


def small_leaf(path: str, value: Any) -> JSON:
    """The tree of a small value that is no plain Python. Raises UnsupportedObject."""
    if is_array(value):
        dtype, shape, data = inline_array(path, value)
        return {TAG: "array", "dtype": dtype, "shape": shape, "data": encode_bytes(data), **array_fields(value)}
    if isinstance(value, np.generic) and value.dtype.name in NUMPY:
        return {TAG: "scalar", "dtype": value.dtype.name, "v": encode_bytes(value.tobytes())}
    raise unsupported(path, value)


def num_bytes(path: str, value: Any) -> int:
    """The size of an array, about; 0 for other values. Raises UnsupportedObject for one that cannot be saved."""
    return array_bytes(path, value) if is_array(value) or is_template(value) else 0


_PLAIN: Mapping[str, Callable[[Any], Any]] = {"size": tuple, "dtype": str, "device": str, "dict": dict}


def small_value(path: str, leaf: Mapping[str, Any], kinds: Mapping[str, Callable[[Any], Any]] = _PLAIN) -> Any:
    """The value of a tag that `small_leaf` wrote. Raises CorruptObject.

    kinds: makes objects of torch; by default they come back as plain data.
    """
    try:
        tag, value = leaf[TAG], leaf["v"]
        if tag == "scalar":
            return np.frombuffer(decode_bytes(value), numpy_type(leaf["dtype"]))[0]
        if tag in kinds:
            return kinds[tag](value)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CorruptObject(f"tree at {path!r} holds a malformed value: {error}") from error
    raise CorruptObject(f"tree at {path!r} holds the unknown tag {tag!r}")


class Collector:
    """Builds a Captured, item by item. Used by one thread for one save. TensorCollector also knows tensors."""

    small = staticmethod(small_leaf)
    """The tree of a leaf that lies in the tree itself."""
    num_bytes = staticmethod(num_bytes)
    """The size of a leaf that may lie in the shard; 0 for others."""

    def __init__(self, ownership: Ownership) -> None:
        self.captured = Captured()
        self.ownership = ownership
        self._prefix = rank_prefix(ownership.rank)
        self.copies: tuple[list[tuple[str, Any]], ...] = [], []
        """Plain tensors of modules and optimizers that other ranks have, too: those beside sharded parameters, where
        nothing else shows that they are copies, and others."""
        self._names: MutableMapping[str, None] = {}
        self._seen: MutableMapping[object, str] = {}

    def fork(self, captured: Captured) -> Self:
        """A collector that continues from this one, for leaves in the same memory. This one must collect no more."""
        other = type(self)(self.ownership)
        other.captured, other._names, other._seen = captured, ChainMap({}, self._names), ChainMap({}, self._seen)
        return other

    def joined(self, path: str, values: Iterable[Any]) -> JSON:
        """The trees of small states, arrays and all, as one tree."""
        merged: JSON = {}
        for value in values:
            merged = merge_trees(merged, encode_tree(value, path, with_records(self._inline_leaf)), path)
        return merged

    def add_local(self, item: str, value: Any) -> None:
        """State of this rank alone: small arrays stay in the tree, large ones go into the shard."""
        self.captured.local[item] = encode_tree(value, item, with_records(self._local_leaf))

    def add_unchanging(self, item: str, value: Any) -> None:
        """Small state of this rank alone that no longer changes: its tree is made after the call."""
        local, leaf = self.captured.local, with_records(self.small)
        self.captured.late.append(lambda: local.update({item: encode_tree(value, item, leaf)}))

    def add_shared(self, item: str, value: Any, inline: int = 0) -> None:
        """State that all ranks hold alike: rank 0 keeps it, and every rank its part of arrays that are distributed.

        inline: arrays of up to this size lie in the tree; by default every one is an entry.
        """
        if self.ownership.rank == 0:
            leaf = with_records(
                lambda path, found: (
                    self.small(path, found)
                    if inline and self.num_bytes(path, found) <= inline
                    else self._leaf(path, found, path)
                )
            )
            self.captured.trees[item] = encode_tree(value, item, leaf)
        elif loaded_jax() is not None:
            encode_tree(value, item, with_records(self._part_leaf))

    def _local_leaf(self, path: str, value: Any) -> JSON:
        if is_distributed(value):
            raise UnsupportedObject(
                f"the array at {path!r} is distributed over processes, and this state is kept per process",
                "Pass it as shared={...}",
            )
        large = self.num_bytes(path, value) > INLINE_BYTES
        return self._leaf(path, value, self._prefix + path) if large else self._inline_leaf(path, value)

    def _part_leaf(self, path: str, value: Any) -> JSON:
        """On ranks that do not keep the tree: what they hold of distributed arrays."""
        if is_distributed(value):
            self._leaf(path, value, path)
        elif is_array(value) or is_tensor(value):
            unique(path, self._names)  # rank 0 uses the name
        return None

    def _inline_leaf(self, path: str, value: Any) -> JSON:
        return self.small(path, value)

    def _leaf(self, path: str, value: Any, name: str) -> JSON:
        """The tree of an array that becomes an entry of this name, or of another small value."""
        if not is_array(value):
            return self.small(path, value)
        return {TAG: "array", "name": self._store(name, array_part(path, value)), **array_fields(value)}

    def _store(
        self,
        path: str,
        part: ArrayPart,
        unit: str | None = None,
        change: Change = Change.ANY_TIME,
        origin: torch.Tensor | None = None,
    ) -> str:
        """Add what this rank writes of a tensor or array to the shard; returns the name of its entry.

        Memory that belongs to several owners (a step count of many parameters) is kept once for each: ranks that hold
        other parameters see another one first. unit: None if it belongs to this rank alone. origin: the live tensor, if
        the pieces are parts of it.
        """
        ownership, name = self.ownership, unique(path, self._names)
        owner = ownership.rank if unit is None else ownership.owner.get(unit)
        if (first := self._seen.setdefault((part.key, owner), name)) != name:
            if unit is None or ownership.owns(unit):
                self.captured.aliases[name] = first
        elif unit is None or ownership.writes(unit, part.ranks, part.holders):
            for piece in part.pieces:
                of_entry = Slice(name, part.dtype, part.shape, piece.box)
                self.captured.leaves.append(of_entry, piece.tensor, piece.tensor if origin is None else origin, change)
        return first
