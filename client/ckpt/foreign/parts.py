"""ForeignState: the state in a file of another program, before its tensors are read. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct

from ckptstore.errors import CorruptObject
from ckptstore.format import boxes
from ckptstore.format.documents import JSON
from ckptstore.format.shards import Slice
from ckptstore.format.trees import TAG

Read = Callable[[int, memoryview], None]
"""Fills the buffer, starting at this byte of the slice's row-major bytes. For any thread. Raises CorruptObject."""


class ForeignSlice(NamedTuple):
    """A slice, and the function that reads its bytes."""

    slice: Slice
    read: Read


class ForeignState(Struct):
    """The state in a file, in the form of a checkpoint."""

    parts: list[ForeignSlice] = []
    trees: dict[str, JSON] = {}
    aliases: dict[str, str] = {}
    notes: list[str] = []
    """Notes for the user about state that can only be restored in part."""

    @property
    def raw_bytes(self) -> int:
        """The size of all tensors."""
        return sum(part.slice.bytes for part in self.parts)

    def add(self, other: ForeignState) -> None:
        """Add the state in another file."""
        self.parts += other.parts
        self.trees |= other.trees
        self.aliases |= other.aliases
        self.notes += other.notes

    def place(self, keys: Sequence[str], leaf: JSON, path: Path) -> None:
        """Put a leaf of the file into the trees. Raises CorruptObject if another one is there."""
        *above, last = keys
        trees = self.trees
        for key in above:
            trees = trees.setdefault(key, {})
        if TAG in trees or last in trees or any(key.startswith(TAG) for key in keys):
            raise CorruptObject(f"the name of tensor {'/'.join(keys)!r} of {path} conflicts with another one")
        trees[last] = leaf


def file_read(path: Path, offset: int) -> Read:
    """Reads uncompressed bytes of a file, starting at `offset`."""

    def read(start: int, buffer: memoryview) -> None:
        with open(path, "rb") as file:
            file.seek(offset + start)
            if file.readinto(buffer) < len(buffer):
                raise CorruptObject(f"{path} ends early", "The file is truncated; copy it again")

    return read


def box_read(array: Any, shape: Sequence[int], item: int) -> Read:
    """Reads elements of `item` bytes of an array, or of what becomes one: the boxes that a range consists of."""

    def read(start: int, buffer: memoryview) -> None:
        done = 0
        for box in boxes.flat_boxes(shape, start // item, (start + len(buffer)) // item):
            ends = zip(boxes.offsets(box), boxes.sizes(box), strict=True)
            try:
                data = np.asarray(array[tuple(slice(first, first + size) for first, size in ends)]).tobytes()
            except ValueError as error:
                raise CorruptObject(f"an array cannot be read: {error}", "Copy it again") from error
            buffer[done : done + len(data)] = data
            done += len(data)

    return read
