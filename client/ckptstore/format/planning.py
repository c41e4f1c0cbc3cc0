"""Plans the reads of shards for requested boxes of a checkpoint. Pure.

Any saved layout serves any requested layout: only the overlaps of slices and requested boxes count. Types with many
instances are msgspec structs: faster to create than data classes, and not tracked by the garbage collector.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from math import prod
from operator import add, mul, sub
from typing import TypeVar

import numpy as np

from ckptstore.codecs.dtypes import ITEM_BYTES, SOURCE
from ckptstore.errors import CorruptObject
from ckptstore.format import boxes
from ckptstore.format.boxes import Box, Overlaps, Want, overlaps
from ckptstore.format.columns import Column, column, concatenate, distinct
from ckptstore.format.documents import Content
from ckptstore.format.shards import ChunkTable, bases_of
from ckptstore.values import Value

_T = TypeVar("_T")
_Strided = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Shape, and strides in bytes on both sides."""

READ_BYTES = 16 << 20
"""Most stored bytes of neighbouring chunks in one read; a larger chunk is read alone."""
_GAP_SHARE = 32
"""At most 1/N of the bytes of a read are gaps: bytes that are not needed."""


class Piece(Value, gc=False):
    """A copy of elements of a decoded chunk into one buffer, between two strided arrays."""

    buffer: str
    at: int
    """Byte offset in the decoded chunk."""
    to: int
    """Byte offset in the buffer."""
    item: int
    """Bytes of an element in the chunk."""
    shape: tuple[int, ...]
    from_strides: tuple[int, ...]
    """In bytes."""
    to_strides: tuple[int, ...]
    cast: str | None = None
    """The type to which float32 elements are cast; None: they are copied."""

    @property
    def bytes(self) -> int:
        """Number of bytes read from the chunk."""
        return prod(self.shape) * self.item

    @property
    def is_flat(self) -> bool:
        """Whether the bytes are contiguous on both sides."""
        return len(self.shape) == 1 and self.from_strides == self.to_strides == (self.item,)


class ChunkRead(Value, gc=False):
    """One chunk to read, and the copies of its decoded bytes."""

    shard: str
    attempt: str | None
    """The attempt whose shard of that name stores the chunk; None: the checkpoint's own."""
    index: int
    """Number in the checkpoint's own shard."""
    offset: int
    """Offset of the stored bytes in the shard."""
    stored: int
    raw: int
    codec: str
    digest: str
    pieces: Sequence[Piece]
    bases: Sequence[ChunkRead] = ()
    """The chunks that a delta is decoded on, in order: without pieces, and without bases of their own."""

    @property
    def name(self) -> str:
        """For error messages."""
        return f"chunk {self.index} of {self.shard}" + (f" in {self.attempt}" if self.attempt else "")

    @property
    def parts(self) -> tuple[ChunkRead, ...]:
        """All that is read for it."""
        return (*self.bases, self)


class ShardRead(Value):
    """A range of a shard that is read at once: chunks in order, and small gaps between them."""

    chunks: tuple[ChunkRead, ...]

    @property
    def shard(self) -> str:
        """Name of the shard."""
        return self.chunks[0].shard

    @property
    def attempt(self) -> str | None:
        """The attempt of the shard; None: the checkpoint's own."""
        return self.chunks[0].attempt

    @property
    def offset(self) -> int:
        """First byte of the range in the shard."""
        return self.chunks[0].offset

    @property
    def bytes(self) -> int:
        """Length of the range."""
        last = self.chunks[-1]
        return last.offset + last.stored - self.offset


def chunks_of(reads: Iterable[ShardRead]) -> list[ChunkRead]:
    """The chunks of these reads, in order."""
    return [chunk for read in reads for chunk in read.chunks]


def entry_bytes(content: Content) -> dict[str, int]:
    """Raw bytes of each entry."""
    return {name: prod(shape) * ITEM_BYTES[dtype] for name, dtype, shape in content.entries.rows()}


def derived_bytes(content: Content) -> dict[str, int]:
    """Raw bytes of each entry that are derived, not stored; entries without derived bytes are omitted."""
    found = Counter[str]()
    for group in boxes.same_dimensions(content, content.slices.derived_rows):
        for row, size in zip(group.rows.tolist(), group.bytes.tolist(), strict=True):
            found[content.entries.name[content.slices.entry[row]]] += size
    return found


def plan_reads(content: Content, wants: Iterable[Want]) -> list[ShardRead]:
    """The reads for all requested boxes: every chunk once, sorted by shard and offset. Pure.

    Raises CorruptObject unless the slices cover each requested box exactly.
    """
    wants = list(wants)
    found = list(overlaps(content, wants))
    table = ChunkTable.of(content, distinct(concatenate(content.slices.shard[one.row] for one in found)).tolist())
    given = [_pieces(content, wants, table, one) for one in found]
    rows, pieces = concatenate(rows for rows, _ in given), [piece for _, some in given for piece in some]
    chunks = table.sorted(distinct(rows))
    place = np.zeros(len(table.raw), np.int64)
    place[chunks] = np.arange(len(chunks))
    ordered = [pieces[number] for number in np.argsort(place[rows], kind="stable").tolist()]
    ends = np.cumsum(np.bincount(place[rows], minlength=len(chunks))).tolist()
    of_chunk = map(ordered.__getitem__, map(slice, [0, *ends], ends))
    return coalesce(_chunk_reads(content, table, chunks, of_chunk))


def plan_all(content: Content) -> list[ChunkRead]:
    """Every chunk of a checkpoint, for verification. Pure."""
    table = ChunkTable.of(content, range(len(content.shards)))
    return list(_chunk_reads(content, table, np.arange(len(table.raw)), repeat(())))


def _pieces(content: Content, wants: Sequence[Want], table: ChunkTable, found: Overlaps) -> tuple[Column, list[Piece]]:
    """The copies from chunks for each overlap, and the chunk of each copy: a row of the table.

    Example: a slice holds rows 0 to 3 of a float32 entry of shape (8, 10), in one chunk, and rows 2 to 5 are requested.
    They overlap in rows 2 and 3. `first` is element 20 of the slice, `last` is 39, `into` is element 0 of the request:
    one flat copy of 80 bytes from byte 80 of the chunk to byte 0 of the buffer. If chunks of 100 bytes split the slice,
    `table.split` divides the bytes [80, 160) into [80, 100) of chunk 0 and [100, 160) of chunk 1: two copies.
    """
    slices, half = content.slices, found.box.shape[1] // 2
    dtypes = [content.entries.dtype[entry] for entry in slices.entry[found.row].tolist()]
    is_derived = np.isin(found.row, slices.derived_rows)
    casts = [dtype if derived else None for dtype, derived in zip(dtypes, is_derived.tolist(), strict=True)]
    to_item = column(ITEM_BYTES[dtype] for dtype in dtypes)
    item = np.where(is_derived, ITEM_BYTES[SOURCE], to_item)
    shape, target, length = found.slices[:, half:], found.wanted[:, half:], found.box[:, half:]
    steps = boxes.all_strides(shape)
    # Element offsets of the first and last shared element in the slice, and of the first in the requested box.
    first = ((found.box[:, :half] - found.slices[:, :half]) * steps).sum(axis=1)
    last = first + ((length - 1) * steps).sum(axis=1)
    into = ((found.box[:, :half] - found.wanted[:, :half]) * boxes.all_strides(target)).sum(axis=1)
    origin = table.streams[slices.shard[found.row]] + slices.at[found.row]
    which, row, low, high = table.split(origin + first * item, origin + (last + 1) * item)
    item, to_item = item[which], to_item[which]
    start, stop = low - origin[which], high - origin[which]
    for cut in np.flatnonzero((start % item != 0) | (stop % item != 0))[:1].tolist():
        entry = content.entries.name[slices.entry[found.row[which[cut]]]]
        raise CorruptObject(f"chunk {table.index[row[cut]]} cuts an element of entry {entry!r}")
    is_flat = ((shape[:, 1:] == length[:, 1:]) & (target[:, 1:] == length[:, 1:])).all(axis=1)[which]
    to = (into[which] - first[which] + start // item) * to_item
    columns = (row, which, low - table.begin[row], to, item, to_item, start // item, stop // item)
    goals = [wants[number] for number in found.want.tolist()]
    pieces = _flat_pieces(goals, casts, [c[is_flat] for c in columns])
    rows: list[int] = []
    strided = zip(*(c[~is_flat].tolist() for c in columns), strict=True)
    for chunk, one, at, _, size, to_size, begin, end in strided:
        held, wanted, shared = (tuple(matrix[one].tolist()) for matrix in (found.slices, found.wanted, found.box))
        for source, goal, merged in _strided(held, wanted, shared, begin, end, (size, to_size)):
            shift, place = at + (source - begin) * size, goals[one].at + goal * to_size
            pieces.append(Piece(goals[one].buffer, shift, place, size, *merged, casts[one]))
            rows.append(chunk)
    return np.append(row[is_flat], column(rows)), pieces


def _flat_pieces(goals: Sequence[Want], casts: Sequence[str | None], columns: Sequence[Column]) -> list[Piece]:
    """The copies that are contiguous on both sides, column by column. Most restored bytes are of this kind."""
    _, which, at, to, item, to_item, begin, end = columns
    numbers = which.tolist()
    places = to + column(goal.at for goal in goals)[which]
    alone = {size: (size,) for size in ITEM_BYTES.values()}
    buffers = [goals[number].buffer for number in numbers]
    steps, to_steps = (map(alone.__getitem__, sizes.tolist()) for sizes in (item, to_item))
    lengths = zip((end - begin).tolist(), strict=True)
    kinds = map(casts.__getitem__, numbers)
    return list(map(Piece, buffers, at.tolist(), places.tolist(), item.tolist(), lengths, steps, to_steps, kinds))


def _strided(
    held: Box, wanted: Box, shared: Box, start: int, stop: int, items: tuple[int, int]
) -> Iterator[tuple[int, int, _Strided]]:
    """The copies of the elements [start, stop) of a slice into a requested box. shared: their intersection.

    Each is the first element in the slice and in the requested box, then shape and strides of both arrays.
    """
    steps, to_steps = boxes.strides(boxes.sizes(held)), boxes.strides(boxes.sizes(wanted))
    begin, length, shift = _minus(shared, held), boxes.sizes(shared), _minus(held, wanted)
    strides, to_strides = ([step * item for step in each] for each, item in zip((steps, to_steps), items, strict=True))
    for part in boxes.flat_boxes(boxes.sizes(held), start, stop):
        corner = list(map(max, boxes.offsets(part), begin))
        ends = zip(boxes.offsets(part), boxes.sizes(part), begin, length, corner, strict=True)
        sizes = [min(a + n, b + m) - c for a, n, b, m, c in ends]
        if all(size > 0 for size in sizes):
            into = map(add, corner, shift)
            yield _dot(corner, steps), _dot(into, to_steps), _merge(sizes, strides, to_strides, items)


def _merge(sizes: Sequence[int], strides: Sequence[int], to_strides: Sequence[int], items: tuple[int, int]) -> _Strided:
    """Shape and strides, after joining dimensions that are contiguous on both sides. items: element sizes."""
    merged: list[tuple[int, int, int]] = [(1, *items)]
    for size, stride, to_stride in reversed(list(zip(sizes, strides, to_strides, strict=True))):
        length, inner, to_inner = merged[-1]
        if size == 1:
            continue
        if stride == length * inner and to_stride == length * to_inner:
            merged[-1] = (length * size, inner, to_inner)
        elif length == 1:
            merged[-1] = (size, stride, to_stride)
        else:
            merged.append((size, stride, to_stride))
    shape, joined, to_joined = zip(*reversed(merged), strict=True)
    return shape, joined, to_joined


def _minus(box: Box, other: Box) -> list[int]:
    return list(map(sub, boxes.offsets(box), boxes.offsets(other)))


def _dot(index: Iterable[int], steps: Iterable[int]) -> int:
    return sum(map(mul, index, steps))


def _chunk_reads(
    content: Content, table: ChunkTable, rows: Column, pieces: Iterable[Sequence[Piece]]
) -> Iterator[ChunkRead]:
    """Rows of the table, grouped by shard, as reads."""
    given = iter(pieces)
    for part in np.split(rows, np.flatnonzero(np.diff(table.shard[rows])) + 1) if len(rows) else ():
        shard = content.shards[table.shard[part[0]]]
        holders = [None, *shard.needed]
        index = table.index[part]
        bases = {
            index: [
                ChunkRead(shard.name, one.attempt, index, one.offset, one.chunk.stored, one.chunk.raw, one.chunk.codec,
                          one.chunk.digest, ())
                for one in found
            ]
            for index, found in bases_of(shard).items()
        }  # fmt: skip
        yield from map(
            ChunkRead,
            repeat(shard.name),
            map(holders.__getitem__, table.holder[part].tolist()),
            index.tolist(),
            table.offset[part].tolist(),
            table.stored[part].tolist(),
            table.raw[part].tolist(),
            map(shard.chunks.codecs.__getitem__, shard.chunks.codec[index].tolist()),
            map(shard.chunks.digest_of, index.tolist()),
            given,
            map(bases.get, index.tolist(), repeat(())),
        )


def join(reads: Iterable[ShardRead], longest: int) -> list[ShardRead]:
    """Join adjacent reads up to `longest` bytes; longer reads stay unchanged. Pure."""
    joined: list[ShardRead] = []
    for read in reads:
        last = joined[-1] if joined else read
        together = (last.shard, last.attempt, last.offset + last.bytes) == (read.shard, read.attempt, read.offset)
        if together and last.bytes + read.bytes <= longest and not (last.chunks[-1].bases or read.chunks[0].bases):
            joined[-1] = ShardRead(last.chunks + read.chunks)
        else:
            joined.append(read)
    return joined


def coalesce(chunks: Iterable[ChunkRead]) -> list[ShardRead]:
    """Join neighbouring chunks, which are sorted by offset, into reads. Pure."""
    reads: list[ShardRead] = []
    current: list[ChunkRead] = []
    begin = useful = 0
    for chunk in chunks:
        stored = chunk.stored
        if current:
            last, span = current[-1], chunk.offset + stored - begin
            gaps = span - useful - stored
            together = last.shard == chunk.shard and last.attempt == chunk.attempt
            # A delta is read by itself: it is small, and much is read for it.
            together = together and not (last.bases or chunk.bases)
            if together and span <= READ_BYTES and 0 <= gaps * _GAP_SHARE <= span:
                current.append(chunk)
                useful += stored
                continue
            reads.append(ShardRead(tuple(current)))
        current, begin, useful = [chunk], chunk.offset, stored
    return [*reads, ShardRead(tuple(current))] if current else reads


def batches(items: Iterable[_T], bytes_of: Callable[[_T], int], most_bytes: int) -> Iterator[list[_T]]:
    """The items in order, in batches of at most `most_bytes`; a larger one has its own batch, before the next is
    asked for."""
    batch: list[_T] = []
    size = 0
    for item in items:
        more = bytes_of(item)
        if batch and size + more > most_bytes:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += more
        if size > most_bytes:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
