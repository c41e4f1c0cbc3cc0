"""Upload: writes the encoded chunks of one shard back to back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ckptstore.format.documents import Chunks
from ckptstore.format.shards import CHUNK_BYTES, EncodedChunk, chunk_table
from ckptstore.stores import Store


@dataclass(frozen=True, slots=True)
class Uploaded:
    """A durable shard."""

    chunks: Chunks
    stored_bytes: int
    upload_s: float
    """Seconds spent in calls of the store; waiting for chunks is not included."""
    busy_s: float
    """At least upload_s: the store may have been writing while this thread waited for chunks."""


def upload_shard(
    store: Store,
    key: str,
    raw_bytes: int,
    chunks: Iterable[EncodedChunk],
    progress: Callable[[int], None],
    encoded: Callable[[], object] | None = None,
) -> Uploaded:
    """Write the shard; durable on return, removed on an error.

    progress: called with the raw bytes written so far. encoded: called once in a thread, while the last bytes are on
    their way; it has returned when this function does. What it writes is not removed.
    """
    written: list[EncodedChunk] = []
    spent, done = 0.0, 0
    started = time.perf_counter()
    with (
        ThreadPoolExecutor(1, thread_name_prefix="ckpt-encoded") as beside,
        store.open_writer(key, size_hint=raw_bytes) as writer,
    ):
        spent += time.perf_counter() - started
        for chunk in chunks:
            started = time.perf_counter()
            writer.write(chunk.data)
            spent += time.perf_counter() - started
            done += chunk.raw
            written.append(EncodedChunk(b"", chunk.raw, chunk.stored, chunk.codec, chunk.digest))
            progress(done)
        if encoded is not None:
            beside.submit(encoded)
        started = time.perf_counter()
    spent += time.perf_counter() - started
    table = chunk_table(written)
    return Uploaded(table, int(table.stored.sum()), spent, max(spent, writer.busy_s))


def seldom(progress: Callable[[int], None], total: int) -> Callable[[int], None]:
    """Calls `progress` about once per CHUNK_BYTES, and with the total: a message costs as much as hashing 1 MB."""
    due = 0

    def passed(done: int) -> None:
        nonlocal due
        if done >= due or done == total:
            due = done + CHUNK_BYTES
            progress(done)

    return passed
