"""What a file of another program holds, before a byte of its tensors is read. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ckptstore.errors import CorruptObject
from ckptstore.format.documents import JSON
from ckptstore.format.shards import Slice

Read = Callable[[int, memoryview], None]
"""Fill the buffer from this byte of the slice's row-major bytes. From any thread. Raises CorruptObject."""


@dataclass(frozen=True, slots=True)
class ForeignSlice:
    """A slice and how to get its bytes."""

    slice: Slice
    read: Read


@dataclass(slots=True)
class ForeignState:
    """The state in a file, as a checkpoint would hold it."""

    parts: list[ForeignSlice] = field(default_factory=list)
    trees: dict[str, JSON] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What the caller should know: state that is kept in a form that restores less than it could."""

    @property
    def raw_bytes(self) -> int:
        """Of all tensors."""
        return sum(part.slice.bytes for part in self.parts)


def file_read(path: Path, offset: int) -> Read:
    """Bytes that lie in `path` as they are, from `offset`."""

    def read(start: int, buffer: memoryview) -> None:
        with open(path, "rb", buffering=0) as file:
            file.seek(offset + start)
            done = 0
            while done < len(buffer):
                count = file.readinto(buffer[done:])
                if not count:
                    raise CorruptObject(f"{path} ends early", "The file is not whole; copy it again")
                done += count

    return read
