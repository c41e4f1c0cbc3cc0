"""The speed of a store for one rank, measured with real objects that are removed again.

The objects lie below `_probes/`, like those of the store's checks. They are removed also after an error and after an
interrupt (Ctrl-C).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from ckptstore import names
from ckptstore.clock import Clock
from ckptstore.errors import CorruptObject, InvalidRequest
from ckptstore.format.documents import digest
from ckptstore.format.shards import CHUNK_BYTES
from ckptstore.names import new_ulid
from ckptstore.stores import Store

NUM_OBJECTS = 4
"""One after the other: a rank uploads one shard at a time."""
_LEAST_BYTES = NUM_OBJECTS * CHUNK_BYTES


class StoreSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank writes and reads in one second, in bytes."""

    store: str
    write_bytes_per_s: float
    """Until the objects are durable."""
    read_bytes_per_s: float
    """As restores read. A local disk may read from the page cache."""
    num_objects: int
    num_bytes: int


def measure_store(
    store: Store, clock: Clock, num_bytes: int, progress: Callable[[int], None] = lambda _: None
) -> StoreSpeed:
    """Write objects of random bytes as shards are written, read them as restores do, compare, and remove them.

    progress: called with bytes written or read. Raises InvalidRequest for fewer bytes than a few chunks, CorruptObject
    if other bytes come back, or the store's errors.
    """
    if num_bytes < _LEAST_BYTES:
        raise InvalidRequest(f"{num_bytes} bytes are too few to measure", f"Give at least {_LEAST_BYTES >> 20} MiB")
    folder = f"{names.PROBES_PREFIX}{new_ulid(clock())}/"
    chunk = os.urandom(CHUNK_BYTES)  # a store may compress or find repeated bytes, within this bound
    chunks = -(-num_bytes // _LEAST_BYTES)
    keys = [f"{folder}object-{number}" for number in range(NUM_OBJECTS)]
    try:
        began = time.perf_counter()
        for key in keys:
            with store.open_writer(key, size_hint=chunks * CHUNK_BYTES) as writer:
                for _ in range(chunks):
                    writer.write(chunk)
                    progress(CHUNK_BYTES)
        written_s = time.perf_counter() - began
        began = time.perf_counter()
        with ThreadPoolExecutor(store.parallel_reads, thread_name_prefix="ckpt-measure") as pool:
            reads = [pool.submit(_read, store, key, at, progress) for key in keys for at in range(chunks)]
            found = [read.result() for read in reads]
        read_s = time.perf_counter() - began
    finally:
        store.delete_many([info.key for info in store.list(folder)])
    if set(found) != {digest(chunk)}:
        raise CorruptObject(f"{store.url} returned other bytes than were written", "Run ckptctl probe")
    total = NUM_OBJECTS * chunks * CHUNK_BYTES
    return StoreSpeed(
        store=store.url,
        write_bytes_per_s=total / written_s,
        read_bytes_per_s=total / read_s,
        num_objects=NUM_OBJECTS,
        num_bytes=total,
    )


def _read(store: Store, key: str, chunk: int, progress: Callable[[int], None]) -> str:
    """The digest of one chunk."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with store.open_reader(key) as reader:
        reader.read(chunk * CHUNK_BYTES, buffer)
    progress(CHUNK_BYTES)
    return digest(buffer)
