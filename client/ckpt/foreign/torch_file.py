"""Reads files that torch.save wrote, without executing code in them; tensors are read when they are needed."""

from __future__ import annotations

import mmap
from pathlib import Path

from ckpt.foreign.archive import read_archive
from ckpt.foreign.bounds import Budget
from ckpt.foreign.parts import ForeignState
from ckpt.foreign.state import to_foreign

_MOST = 1 << 28
"""Units of a Budget: ten million numbers in lists, or a million tensors. Larger states hold them as tensors."""


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
    return to_foreign(read_archive(map_file(path), str(path), budget), item, str(path), budget)
