"""Destinations of the entries' bytes in new arrays of numpy. Does not import torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from ckpt.capture.arrays import Array, byte_view, numpy_type
from ckpt.capture.collector import small_value
from ckpt.lazily import torch
from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import CorruptObject, UnsupportedFormat
from ckptstore.format import boxes
from ckptstore.format.boxes import Box, Want
from ckptstore.format.documents import JSON, Content
from ckptstore.format.planning import plan_reads
from ckptstore.format.trees import TAG, decode_bytes, decode_tree
from ckptstore.reading.fetch import Buffers, fetch
from ckptstore.reading.source import Source


class HostDestinations:
    """Collects the parts of a checkpoint that a restore needs, as arrays. `Destinations` also fills tensors."""

    small: Callable[[str, Mapping[str, Any]], Any] = staticmethod(small_value)
    """The value of a small leaf; what stands for an object of torch comes back as plain data."""

    waiting: Any = ()
    """Targets that have no memory yet; `place` gives it to some, and plans their reads."""

    def __init__(self, content: Content) -> None:
        self._content = content
        self._shapes = content.entries.types()
        self._arrays: dict[tuple[str, Box], list[Array]] = defaultdict(list)

    def entry(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Type, by its name in documents, and shape of an entry. Raises CorruptObject."""
        if name not in self._shapes:
            raise CorruptObject(f"a tree names the entry {name!r}, which the manifest does not have")
        return self._shapes[name]

    def new_array(self, name: str, box: Box | None = None) -> Array:
        """A new array that receives a box of an entry, by default all of it. Raises UnsupportedFormat."""
        dtype, shape = self.entry(name)
        box = boxes.whole(shape) if box is None else box
        array = np.empty(boxes.sizes(box), numpy_type(dtype))
        self._arrays[name, box].append(array)
        return array

    def new(self, name: str) -> Any:
        """A new array, or tensor in host memory, that receives a whole entry."""
        return self.new_array(name)

    def decode(self, tree: JSON, path: str, device: torch.device | None = None) -> Any:
        """The value of a tree; its arrays are filled by `place`. device: where tensors of GPUs go."""
        return decode_tree(tree, path, lambda at, leaf: self._unleaf(at, leaf, device))

    def refill(self, tree: JSON, path: str, template: Any) -> tuple[Any, list[str]]:
        """The value of a tree, with those tensors of `template` that fit filled in place; and the paths of these."""
        return self.decode(tree, path), []

    def _unleaf(self, at: str, leaf: dict[str, Any], device: torch.device | None) -> Any:
        return self.array_of(at, leaf) if leaf[TAG] in ("tensor", "array") else self.small(at, leaf)

    def array_of(self, at: str, leaf: Mapping[str, Any]) -> Array:
        """The array of a leaf: a new one, or what lies in the tree itself."""
        return self.new_array(leaf["name"]) if "name" in leaf else inline_array(at, leaf)

    def wants(self) -> list[Want]:
        """The ranges to read; each want has its own buffer."""
        return [Want(name, box, f"array {i}") for i, (name, box) in enumerate(self._arrays)]

    def clashes(self, source: Source, checkpoint: Checkpoint) -> list[str]:
        """Entries with different values for one place in memory. Reads those that share memory."""
        return []

    def allocate(self) -> None:
        """Plan the reads. Arrays are read into directly."""
        self.reads = plan_reads(self._content, self.wants())

    @contextmanager
    def receiving(self) -> Iterator[Buffers]:
        """Buffers for the wants, to be filled by `reads` inside the block. Call `allocate` first."""
        yield self._array_bytes()

    def _array_bytes(self) -> dict[str, memoryview]:
        return {f"array {i}": byte_view(found[0]).data for i, found in enumerate(self._arrays.values())}

    def place(self) -> None:
        """Copy the filled buffers to every target that is not its own buffer."""
        for first, *others in self._arrays.values():
            for other in others:
                other[...] = first
        self._arrays.clear()
        self.reads = []

    def read(self, source: Source, checkpoint: Checkpoint) -> None:
        """Fetch, verify and place everything, without other ranks."""
        self.allocate()
        while self.reads:
            with self.receiving() as buffers:
                fetch(source, checkpoint, self.reads, buffers)
            self.place()


def inline_array(path: str, leaf: Mapping[str, Any]) -> Array:
    """The array that lies in a tree itself. Raises CorruptObject if it is malformed."""
    try:
        data, dtype = bytearray(decode_bytes(leaf["data"])), numpy_type(leaf["dtype"])
        return np.frombuffer(data, dtype).reshape(leaf["shape"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptObject(f"tree at {path!r} holds a malformed array: {error}") from error
    except UnsupportedFormat as error:
        raise UnsupportedFormat(f"array at {path!r}: {error.message}", error.hint) from None
