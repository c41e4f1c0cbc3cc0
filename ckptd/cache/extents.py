"""Bookkeeping of the cached ranges of objects. No I/O, no locks."""

from __future__ import annotations

import re
from bisect import bisect_right, insort
from collections import OrderedDict

from ckptstore.errors import InvalidName
from ckptstore.names import Attempt, RunKeys, run_of
from ckptstore.values import Value

BLOCK_BYTES = 4 << 20
"""Extents do not cross multiples of it, so that one read needs bounded memory."""
GRAIN_BYTES = 4 << 10
"""Extents are aligned to it, or end with their object: less than 8 KiB is fetched beyond the requested range."""
_MIN_MEAN_BYTES = 64 << 10
_FILE_NAME = re.compile(r"([^@/]+)@([^@/]+)@([a-z0-9.-]+)@([0-9]{1,15})-([0-9]{1,8})")


class Extent(Value, order=True):
    """A range of an object, within one block."""

    key: str
    """Key of the object in the store: run/attempts/attempt/name."""
    offset: int
    bytes: int

    @property
    def end(self) -> int:
        """The offset after its last byte."""
        return self.offset + self.bytes

    @property
    def owner(self) -> tuple[str, Attempt]:
        """The run and the attempt that it belongs to."""
        return run_of(self.key), Attempt.parse(self.key.split("/")[2])

    @property
    def file_name(self) -> str:
        """The file name; `parse` is the inverse."""
        folder, _, attempt, name = self.key.split("/")
        return f"{folder}@{attempt}@{name}@{self.offset}-{self.bytes}"

    @staticmethod
    def parse(file_name: str) -> Extent | None:
        """The extent of a file name; None if this version of the cache does not write such a name."""
        match = _FILE_NAME.fullmatch(file_name)
        if match is None:
            return None
        try:
            prefix = RunKeys(run_of(match[1])).attempt(Attempt.parse(match[2]))
        except InvalidName:
            return None
        extent = Extent(prefix + match[3], int(match[4]), int(match[5]))
        fits = extent.bytes > 0 and extent.offset // BLOCK_BYTES == (extent.end - 1) // BLOCK_BYTES
        return extent if fits else None


class Extents:
    """All extents: being fetched from the store, or on disk. They never overlap. Not thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self.stored_bytes = 0
        self._limit_bytes = limit_bytes
        self._blocks: dict[tuple[str, int], list[Extent]] = {}
        self._stored: OrderedDict[Extent, None] = OrderedDict()  # the least recently used first
        self._arriving: set[Extent] = set()

    def at(self, key: str, offset: int) -> Extent | None:
        """The extent that has this byte."""
        before, _ = self._neighbours(key, offset)
        return before if before and offset < before.end else None

    def overlapping(self, key: str, offset: int, end: int) -> list[Extent]:
        """The extents that have a byte from `offset` up to `end`."""
        blocks = range(offset // BLOCK_BYTES, (end - 1) // BLOCK_BYTES + 1)
        near = (extent for block in blocks for extent in self._blocks.get((key, block), []))
        return [extent for extent in near if extent.offset < end and offset < extent.end]

    def claim(self, key: str, size: int, offset: int, end: int) -> Extent:
        """A new extent for the bytes from `offset`, which no extent has, up to `end`, within one block.

        size: of the object. It counts as being fetched until `store` or `forget` is called.
        """
        before, after = self._neighbours(key, offset)
        begin = max(offset - offset % GRAIN_BYTES, before.end if before else 0)
        stop = min(-(-end // GRAIN_BYTES) * GRAIN_BYTES, (offset // BLOCK_BYTES + 1) * BLOCK_BYTES, size)
        extent = Extent(key, begin, (min(stop, after.offset) if after else stop) - begin)
        self._insert(extent)
        return extent

    def adopt(self, extent: Extent) -> bool:
        """Add an extent that is on disk, as the most recently used; False if it overlaps another."""
        before, after = self._neighbours(extent.key, extent.offset)
        if (before and before.end > extent.offset) or (after and after.offset < extent.end):
            return False
        self._insert(extent)
        self.store(extent)
        return True

    def make_room(self, extent: Extent) -> list[Extent] | None:
        """Make room for a fetched extent; returns those removed for it, or None if it does not fit."""
        if self._arriving_bytes() + extent.bytes > self._limit_bytes:
            return None
        self._arriving.add(extent)
        return self.shrink()

    def store(self, extent: Extent) -> None:
        """Mark an extent as being on disk. One that was fetched needs `make_room` before it is written."""
        self._arriving.discard(extent)
        self._stored[extent] = None
        self.stored_bytes += extent.bytes

    def use(self, extent: Extent) -> None:
        """Mark an extent as the most recently used."""
        if extent in self._stored:
            self._stored.move_to_end(extent)

    def forget(self, extent: Extent) -> None:
        """Remove an extent in any state; an unknown one is ignored."""
        block = self._blocks.get(_block(extent), [])
        if extent not in block:
            return
        block.remove(extent)
        if not block:
            del self._blocks[_block(extent)]
        self._arriving.discard(extent)
        if extent in self._stored:
            del self._stored[extent]
            self.stored_bytes -= extent.bytes

    def shrink(self) -> list[Extent]:
        """Remove the least recently used extents until the rest is within the limit; returns them."""
        forgotten = []
        limit = self._limit_bytes - self._arriving_bytes()
        # Small files cost more than their bytes, so their number is limited too.
        most = self._limit_bytes // _MIN_MEAN_BYTES - len(self._arriving)
        while self._stored and (self.stored_bytes > limit or len(self._stored) > most):
            extent = next(iter(self._stored))
            self.forget(extent)
            forgotten.append(extent)
        return forgotten

    def stored(self) -> list[Extent]:
        """All that are on disk, the least recently used first."""
        return list(self._stored)

    def _arriving_bytes(self) -> int:
        return sum(extent.bytes for extent in self._arriving)

    def _insert(self, extent: Extent) -> None:
        insort(self._blocks.setdefault(_block(extent), []), extent)

    def _neighbours(self, key: str, offset: int) -> tuple[Extent | None, Extent | None]:
        """The extents of the same block that begin at or before the offset, and after it."""
        block = self._blocks.get((key, offset // BLOCK_BYTES), [])
        index = bisect_right(block, offset, key=lambda extent: extent.offset)
        return block[index - 1] if index else None, block[index] if index < len(block) else None


def _block(extent: Extent) -> tuple[str, int]:
    return extent.key, extent.offset // BLOCK_BYTES
