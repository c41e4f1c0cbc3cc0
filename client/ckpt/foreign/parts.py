"""ForeignState: the state in a file of another program, before its tensors are read. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from ckptstore.errors import CorruptObject
from ckptstore.format.documents import JSON
from ckptstore.format.shards import Slice

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


def file_read(path: Path, offset: int) -> Read:
    """Reads uncompressed bytes of a file, starting at `offset`."""

    def read(start: int, buffer: memoryview) -> None:
        with open(path, "rb", buffering=0) as file:
            file.seek(offset + start)
            done = 0
            while done < len(buffer):
                count = file.readinto(buffer[done:])
                if not count:
                    raise CorruptObject(f"{path} ends early", "The file is truncated; copy it again")
                done += count

    return read
