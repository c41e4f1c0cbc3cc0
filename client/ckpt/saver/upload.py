"""Upload: writes the encoded chunks of one shard back to back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ckptstore.format.documents import Chunks
from ckptstore.format.shards import CHUNK_BYTES, EncodedChunk, chunk_table
from ckptstore.stores import Store


@dataclass(frozen=True, slots=True)
class Uploaded:
    """A durable shard."""

    chunks: Chunks
    stored_bytes: int
    """Without the tail, which begins there."""
    upload_s: float
    """Seconds spent in calls of the store; waiting for chunks is not included."""


def upload_shard(
    store: Store,
    key: str,
    raw_bytes: int,
    chunks: Iterable[EncodedChunk],
    progress: Callable[[int], None],
    tail: Callable[[], bytes] = bytes,
) -> Uploaded:
    """Write the shard; durable on return, removed on an error.

    progress: called with the raw bytes written so far. tail: called after the last chunk; what it returns is written
    behind it.
    """
    written: list[EncodedChunk] = []
    spent, done = 0.0, 0
    started = time.perf_counter()
    with store.open_writer(key, size_hint=raw_bytes) as writer:
        spent += time.perf_counter() - started
        for chunk in chunks:
            started = time.perf_counter()
            writer.write(chunk.data)
            spent += time.perf_counter() - started
            done += chunk.raw
            written.append(EncodedChunk(b"", chunk.raw, chunk.stored, chunk.codec, chunk.digest))
            progress(done)
        last = tail()
        started = time.perf_counter()
        writer.write(last)
    spent += time.perf_counter() - started
    table = chunk_table(written)
    return Uploaded(table, int(table.stored.sum()), spent)


def seldom(progress: Callable[[int], None], total: int) -> Callable[[int], None]:
    """Calls `progress` about once per CHUNK_BYTES, and with the total: a message costs as much as hashing 1 MB."""
    due = 0

    def passed(done: int) -> None:
        nonlocal due
        if done >= due or done == total:
            due = done + CHUNK_BYTES
            progress(done)

    return passed
