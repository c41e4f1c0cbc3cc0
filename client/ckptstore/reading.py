"""Reading: fetch what was planned, verify, decode, place.

Every chunk is checked against its checksum before a byte of it reaches a destination.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ckptstore.catalog import Checkpoint
from ckptstore.codecs import RAW, decode
from ckptstore.documents import digest
from ckptstore.errors import CkptError, CorruptObject
from ckptstore.planning import ChunkRead, Piece, ShardRead
from ckptstore.source import Source

Progress = Callable[[int], None]
"""Called with the number of raw bytes just done; from any thread."""
Buffers = Mapping[str, memoryview]
"""Writable bytes by the names that pieces give."""

DEFAULT_THREADS = min(8, max(2, os.cpu_count() or 2))
_ELEMENTS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


def fetch(
    source: Source,
    checkpoint: Checkpoint,
    reads: Sequence[ShardRead],
    buffers: Buffers,
    progress: Progress = lambda _: None,
    threads: int = DEFAULT_THREADS,
) -> None:
    """Fetch, verify and decode the chunks, and place their pieces.

    Returns when all bytes are placed. On the first error the rest is given up, and buffers hold a mixture.
    """
    stop = threading.Event()

    def work(read: ShardRead) -> None:
        if stop.is_set():
            return
        try:
            stored = fetch_stored(source, checkpoint, read)
            for chunk in read.chunks:
                place_chunk(checkpoint, chunk, stored[chunk.offset - read.offset :][: chunk.stored], buffers)
                progress(chunk.raw)
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(max(1, threads), thread_name_prefix="ckpt-fetch") as pool:
        try:
            for future in [pool.submit(work, read) for read in reads]:
                future.result()
        except BaseException:  # an interrupt as well: the pool waits for all that is queued
            stop.set()
            raise


def fetch_stored(source: Source, checkpoint: Checkpoint, read: ShardRead) -> memoryview:
    """The stored bytes of a stretch, unchecked. Raises CorruptObject, ObjectMissing or Unavailable."""
    stored = memoryview(bytearray(read.bytes))
    source.read_shard(checkpoint.holder(read.attempt), read.shard, read.offset, stored)
    return stored


def check_chunk(checkpoint: Checkpoint, chunk: ChunkRead, stored: memoryview) -> None:
    """CorruptObject unless the stored bytes are those that were written."""
    if digest(stored) != chunk.digest:
        raise CorruptObject(f"{chunk.name} of {checkpoint.id} does not match its checksum")


def place_chunk(checkpoint: Checkpoint, chunk: ChunkRead, stored: memoryview, buffers: Buffers) -> None:
    """Check and decode one chunk, and place its pieces. Raises CorruptObject."""
    check_chunk(checkpoint, chunk, stored)
    first = chunk.pieces[0]
    if len(chunk.pieces) == 1 and first.is_flat and first.bytes == chunk.raw:
        _decode(checkpoint, chunk, stored, buffers[first.buffer][first.to : first.to + first.bytes])
        return
    raw = stored
    if chunk.codec != RAW:
        raw = memoryview(bytearray(chunk.raw))
        _decode(checkpoint, chunk, stored, raw)
    for piece in chunk.pieces:
        _place(piece, raw, buffers[piece.buffer])


def _place(piece: Piece, raw: memoryview, buffer: memoryview) -> None:
    if piece.is_flat:
        buffer[piece.to : piece.to + piece.bytes] = raw[piece.at : piece.at + piece.bytes]
        return
    kind = _ELEMENTS[piece.item]
    source = np.ndarray(piece.shape, kind, raw, piece.at, piece.from_strides)
    np.ndarray(piece.shape, kind, buffer, piece.to, piece.to_strides)[...] = source


def _decode(checkpoint: Checkpoint, chunk: ChunkRead, stored: memoryview, into: memoryview) -> None:
    try:
        decode(chunk.codec, stored, into)
    except CkptError as error:
        raise CorruptObject(f"{chunk.name} of {checkpoint.id}: {error.message}") from error
