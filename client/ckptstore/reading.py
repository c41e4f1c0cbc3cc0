"""Reading entries: a pure plan from a manifest to chunk reads, then fetch, verify, decode, place.

Every chunk is checked against its checksum before a byte of it reaches a destination.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from ckptstore.catalog import Checkpoint
from ckptstore.codecs import RAW, decode
from ckptstore.documents import Content, Shard, digest
from ckptstore.dtypes import ITEM_BYTES
from ckptstore.errors import CkptError, CorruptObject
from ckptstore.source import Source

Progress = Callable[[int], None]
"""Called with the number of raw bytes just done; from any thread."""

DEFAULT_THREADS = min(8, max(2, os.cpu_count() or 2))


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a decoded chunk that belong to one entry."""

    entry: str
    at: int
    """Offset in the decoded chunk."""
    into: int
    """Offset in the entry's row-major bytes."""
    bytes: int


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """One chunk to fetch, and where its decoded bytes go."""

    shard: str
    index: int
    offset: int
    """Of the stored bytes in the shard."""
    stored: int
    raw: int
    codec: str
    digest: str
    pieces: tuple[Piece, ...]

    @property
    def name(self) -> str:
        """For error messages."""
        return f"chunk {self.index} of {self.shard}"


def plan_reads(content: Content, wanted: Collection[str]) -> list[ChunkRead]:
    """The chunks that hold the wanted entries, each once, in shard order. Pure.

    Raises CorruptObject if the slices of a wanted entry do not cover it exactly.
    """
    entries, slices = content.entries, content.slices
    covered: dict[str, list[tuple[int, int]]] = {name: [] for name in wanted}
    layouts = [_ShardLayout.of(shard) for shard in content.shards]
    pieces: dict[tuple[int, int], list[Piece]] = {}
    for index, shard, at, box in zip(slices.entry, slices.shard, slices.at, slices.box, strict=True):
        name = entries.name[index]
        if name not in covered:
            continue
        item = ITEM_BYTES[entries.dtype[index]]
        for into, size in _runs(entries.shape[index], box, item):
            covered[name].append((into, size))
            for chunk, piece in layouts[shard].split(name, at, into, size):
                pieces.setdefault((shard, chunk), []).append(piece)
            at += size
    _check_cover(content, covered)
    return [
        _chunk_read(content.shards[shard], layouts[shard], chunk, found)
        for (shard, chunk), found in sorted(pieces.items())
    ]


def plan_all(content: Content) -> list[ChunkRead]:
    """Every chunk of a checkpoint, for verification. Pure."""
    layouts = [_ShardLayout.of(shard) for shard in content.shards]
    return [
        _chunk_read(shard, layout, chunk, ())
        for shard, layout in zip(content.shards, layouts, strict=True)
        for chunk in range(len(shard.chunks.raw))
    ]


def entry_bytes(content: Content) -> dict[str, int]:
    """Raw bytes of each entry."""
    entries = content.entries
    return {
        name: prod(shape) * ITEM_BYTES[dtype]
        for name, dtype, shape in zip(entries.name, entries.dtype, entries.shape, strict=True)
    }


def fetch(
    source: Source,
    checkpoint: Checkpoint,
    reads: Sequence[ChunkRead],
    destinations: Mapping[str, memoryview],
    progress: Progress = lambda _: None,
    threads: int = DEFAULT_THREADS,
) -> None:
    """Fetch, verify and decode the chunks, and place their pieces.

    destinations: writable row-major bytes of each entry named by a piece. Returns when all bytes
    are placed. On the first error the rest is given up, and destinations hold a mixture.
    """
    stop = threading.Event()

    def work(read: ChunkRead) -> None:
        if stop.is_set():
            return
        try:
            _fetch_chunk(source, checkpoint, read, destinations)
        except BaseException:
            stop.set()
            raise
        progress(read.raw)

    with ThreadPoolExecutor(max(1, threads), thread_name_prefix="ckpt-fetch") as pool:
        try:
            for future in [pool.submit(work, read) for read in reads]:
                future.result()
        except BaseException:  # an interrupt as well: the pool waits for all that is queued
            stop.set()
            raise


def fetch_stored(source: Source, checkpoint: Checkpoint, read: ChunkRead) -> memoryview:
    """The stored bytes of one chunk, checked. Raises CorruptObject, ObjectMissing or Unavailable."""
    stored = memoryview(bytearray(read.stored))
    source.read_shard(checkpoint, read.shard, read.offset, stored)
    if digest(stored) != read.digest:
        raise CorruptObject(f"{read.name} of {checkpoint.id} does not match its checksum")
    return stored


def _fetch_chunk(
    source: Source, checkpoint: Checkpoint, read: ChunkRead, destinations: Mapping[str, memoryview]
) -> None:
    stored = fetch_stored(source, checkpoint, read)
    whole = read.pieces[0]
    if len(read.pieces) == 1 and whole.bytes == read.raw:
        raw = destinations[whole.entry][whole.into : whole.into + whole.bytes]
        _decode(checkpoint, read, stored, raw)
        return
    if read.codec == RAW:
        raw = stored
    else:
        raw = memoryview(bytearray(read.raw))
        _decode(checkpoint, read, stored, raw)
    for piece in read.pieces:
        target = destinations[piece.entry]
        target[piece.into : piece.into + piece.bytes] = raw[piece.at : piece.at + piece.bytes]


def _decode(checkpoint: Checkpoint, read: ChunkRead, stored: memoryview, into: memoryview) -> None:
    try:
        decode(read.codec, stored, into)
    except CkptError as error:
        raise CorruptObject(f"{read.name} of {checkpoint.id}: {error.message}") from error


@dataclass(frozen=True, slots=True)
class _ShardLayout:
    """Where each chunk of a shard begins, raw and stored; one more element marks the end."""

    raw: list[int]
    stored: list[int]

    @staticmethod
    def of(shard: Shard) -> _ShardLayout:
        return _ShardLayout(
            list(accumulate(shard.chunks.raw, initial=0)), list(accumulate(shard.chunks.stored, initial=0))
        )

    def split(self, entry: str, at: int, into: int, size: int) -> Iterator[tuple[int, Piece]]:
        """The bytes [at, at + size) of the raw stream, chunk by chunk."""
        end = at + size
        chunk = bisect_right(self.raw, at) - 1
        while at < end:
            part = min(end, self.raw[chunk + 1]) - at
            yield chunk, Piece(entry, at - self.raw[chunk], into, part)
            at, into, chunk = at + part, into + part, chunk + 1


def _chunk_read(shard: Shard, layout: _ShardLayout, chunk: int, pieces: Sequence[Piece]) -> ChunkRead:
    columns = shard.chunks
    return ChunkRead(
        shard=shard.name,
        index=chunk,
        offset=layout.stored[chunk],
        stored=columns.stored[chunk],
        raw=columns.raw[chunk],
        codec=columns.codec[chunk],
        digest=columns.digest[chunk],
        pieces=tuple(pieces),
    )


def _runs(shape: Sequence[int], box: Sequence[int] | None, item: int) -> Iterator[tuple[int, int]]:
    """(offset in the entry, bytes) of each contiguous run of a box, in the box's row-major order."""
    if box is None:
        size = prod(shape) * item
        if size:
            yield 0, size
        return
    offsets, sizes = box[: len(shape)], box[len(shape) :]
    if 0 in sizes:
        return
    # Trailing dimensions that the box spans whole belong to the run, and one more does partly.
    split = len(shape)
    while split > 0 and sizes[split - 1] == shape[split - 1]:
        split -= 1
    split = max(split - 1, 0)
    strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
    run = prod(sizes[split:]) * item
    base = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    for row in range(prod(sizes[:split])):
        start = base
        for dimension in reversed(range(split)):
            row, index = divmod(row, sizes[dimension])
            start += index * strides[dimension]
        yield start * item, run


def _check_cover(content: Content, covered: Mapping[str, list[tuple[int, int]]]) -> None:
    expected = entry_bytes(content)
    for name, runs in covered.items():
        end = 0
        for start, size in sorted(runs):
            if start != end:
                break
            end += size
        if end != expected[name]:
            raise CorruptObject(
                f"the slices of entry {name!r} have a gap or an overlap at byte {end} of {expected[name]}",
                "The checkpoint was written by a faulty program; use another one",
            )
