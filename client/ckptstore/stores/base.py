"""The contract of a store. Nothing else in this project touches a file system or an object store.

What a store must provide:
- a key is visible either with all of its bytes or not at all, except for objects being written
  through `open_writer`, whose names are unique to an attempt;
- a read or a list that begins after a write returned sees that write;
- `put_if_absent` has at most one winner per key, also between processes and machines.

Keys are relative, separated by "/", and made by ckptstore.names only. All methods may be called
from any thread. Errors are StoreUnavailable, StoreFull, StoreReadOnly and ObjectMissing.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType

from ckptstore.errors import CorruptObject
from ckptstore.format.codecs import Buffer

PARALLEL_READS = min(8, max(2, os.cpu_count() or 2))
"""Where a read keeps a core busy."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object, as a listing tells it."""

    key: str
    bytes: int
    modified_at: float
    """Seconds since the epoch, by the store's clock."""


class ObjectWriter(ABC):
    """One object being written from front to back. Leaving the `with` block normally makes it durable.

    Leaving it by an exception removes what was written. Not for use by several threads at once.
    """

    @property
    def busy_s(self) -> float:
        """For how long bytes were on their way in the background; 0 if that happens in the calls themselves."""
        return 0.0

    @abstractmethod
    def write(self, data: Buffer) -> None:
        """Append `data`; the caller may reuse the buffer afterwards.

        Bytes and read-only views need not be copied: they must stay as they are until the block is left.
        """

    @abstractmethod
    def commit(self) -> None:
        """Make the object durable."""

    @abstractmethod
    def abort(self) -> None:
        """Remove what was written; never raises."""

    def __enter__(self) -> ObjectWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
            return
        try:
            self.commit()
        except BaseException:
            self.abort()
            raise


class ObjectReader(ABC):
    """One object being read by one thread, until the `with` block is left."""

    small_reads = False
    """Whether reads of some hundred KiB cost no more per byte than large ones."""

    def expect(self, offset: int, num_bytes: int) -> None:  # noqa: B027 - most have nothing to prepare
        """Say that the next reads lie within these bytes, in order; others may come all the same."""

    @abstractmethod
    def read(self, offset: int, buffer: memoryview) -> None:
        """Fill the whole buffer from `offset`; an object that ends early is a CorruptObject."""

    def read_parts(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill one buffer after the other with the bytes from `offset` on."""
        for buffer in buffers:
            self.read(offset, buffer)
            offset += len(buffer)

    @abstractmethod
    def close(self) -> None:
        """Give up what is held of the object."""

    def __enter__(self) -> ObjectReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RangeReader(ObjectReader):
    """Every read is a request of its own."""

    def __init__(self, get_range: Callable[[int, memoryview], None]) -> None:
        self._get_range = get_range

    def read(self, offset: int, buffer: memoryview) -> None:
        """One request."""
        self._get_range(offset, buffer)

    def close(self) -> None:
        """Nothing is held."""


class Store(ABC):
    """Bytes by key under one root."""

    url: str
    """Where the root is, for people and error messages; never holds credentials."""
    identity: str
    """Equal for stores that hold the same objects: the URL, and which service answers for it."""
    parallel_reads: int = PARALLEL_READS
    """How many ranged reads at a time are fastest."""
    longest_read: int = 0
    """Bytes of an object that one open reader should be asked for at once, where that costs no memory; 0: no matter."""
    upload_bytes: int = 0
    """What a writer holds of what is on its way, at most; may be set to less."""
    shared_between_processes: bool = True
    creates_by_itself: bool = False
    """`put_if_absent` is this program's own doing; a server's word is probed first (arbitration.py)."""
    arbitrated: bool = False
    """Decisions are made by somebody else, because the store itself cannot make them."""

    @abstractmethod
    def put(self, key: str, data: Buffer) -> None:
        """Write an object whole, replacing any other; durable on return."""

    @abstractmethod
    def put_if_absent(self, key: str, data: Buffer) -> bool:
        """Write an object whole unless it exists; durable on return.

        False means "exists", which after a lost reply may be this very call's doing: whoever needs
        to know must read the object back (ckptstore.commits.commit does).
        """

    @abstractmethod
    def open_writer(self, key: str, size_hint: int = 0) -> ObjectWriter:
        """Write a large object from front to back. size_hint: expected bytes, 0 for unknown."""

    @abstractmethod
    def get(self, key: str) -> bytes:
        """The whole object."""

    @abstractmethod
    def read_into(self, key: str, offset: int, buffer: memoryview) -> int:
        """Read bytes from `offset` into the caller's buffer; returns how many, short only at the object's end."""

    @abstractmethod
    def size(self, key: str) -> int:
        """Bytes of the object."""

    @abstractmethod
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects whose key starts with `prefix` (which ends with "/", or is empty), in key order."""

    @abstractmethod
    def list_folders(self, prefix: str) -> Iterator[str]:
        """The names directly below `prefix` that hold objects, in order, without "/"."""

    @abstractmethod
    def delete_many(self, keys: Iterable[str]) -> None:
        """Delete objects; one that does not exist counts as deleted."""

    def abort_uploads(self, prefix: str, begun_before: float) -> int:
        """Free what uploads below `prefix` left that were never finished and began before then; returns how many.

        A store whose unfinished uploads are ordinary objects, or none, has nothing to do.
        """
        return 0

    def get_range(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill the whole buffer from `offset`; an object that ends early is a CorruptObject."""
        count = self.read_into(key, offset, buffer)
        if count != len(buffer):
            raise too_short(self.object_url(key), offset, count, len(buffer))

    def open_reader(self, key: str) -> ObjectReader:
        """Read an object in several parts. Raises ObjectMissing here or at the first read."""
        return RangeReader(partial(self.get_range, key))

    def object_url(self, key: str) -> str:
        """The URL of one object, for messages."""
        return f"{self.url}/{key}"


def too_short(url: str, offset: int, count: int, expected: int) -> CorruptObject:
    """What a reader says who got `count` of `expected` bytes."""
    return CorruptObject(f"{url} ends after {offset + count} bytes, {offset + expected} were expected")
