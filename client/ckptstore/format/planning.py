"""What to read: a pure plan from a manifest, and the boxes that somebody wants, to reads of shards.

Any saved layout serves any wanted one: what counts is where the box of a slice and a wanted box overlap. What
there are many of are msgspec's structs: quicker to make than data classes, and nothing for the garbage collector.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from msgspec import Struct

from ckptstore.errors import CorruptObject
from ckptstore.format import boxes
from ckptstore.format.boxes import Box, BoxGroup, Matrix
from ckptstore.format.casting import SOURCE
from ckptstore.format.columns import Column
from ckptstore.format.documents import Content, Shard
from ckptstore.format.dtypes import ITEM_BYTES
from ckptstore.format.places import Places

READ_BYTES = 16 << 20
"""Stored bytes of neighbouring chunks that are fetched at once, at most; a larger chunk is fetched alone."""
_GAP_SHARE = 32
"""Of what one read fetches, at most this fraction is bytes that nobody asked for."""


class Want(Struct, frozen=True, gc=False):
    """A box of an entry that somebody wants, and where its row-major bytes go."""

    entry: str
    box: Box | None
    """None: the whole entry."""
    buffer: str
    at: int = 0
    """Byte of the buffer where the box begins."""


class Piece(Struct, frozen=True, gc=False):
    """Elements of a decoded chunk that go into one buffer: a copy between two strided arrays."""

    buffer: str
    at: int
    """Byte of the decoded chunk."""
    to: int
    """Byte of the buffer."""
    item: int
    """Bytes of an element."""
    shape: tuple[int, ...]
    from_strides: tuple[int, ...]
    """In bytes."""
    to_strides: tuple[int, ...]
    cast: str | None = None
    """The type that its float32 elements are cast to; None: they are copied."""

    @property
    def bytes(self) -> int:
        """How many it copies."""
        return prod(self.shape) * self.item

    @property
    def is_flat(self) -> bool:
        """Whether the bytes lie together on both sides."""
        return len(self.shape) == 1 and self.from_strides == self.to_strides == (self.item,)


class ChunkRead(Struct, frozen=True, gc=False):
    """One chunk to fetch, and where its decoded bytes go."""

    shard: str
    attempt: str | None
    """Whose shard of that name it lies in; None: the checkpoint's own."""
    index: int
    """In the checkpoint's own shard."""
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


@dataclass(frozen=True, slots=True)
class ShardRead:
    """A stretch of a shard that is fetched at once: chunks, in order, and small gaps between them."""

    chunks: tuple[ChunkRead, ...]

    @property
    def shard(self) -> str:
        """Name of the shard."""
        return self.chunks[0].shard

    @property
    def attempt(self) -> str | None:
        """Whose shard it is; None: the checkpoint's own."""
        return self.chunks[0].attempt

    @property
    def offset(self) -> int:
        """First byte of the shard."""
        return self.chunks[0].offset

    @property
    def bytes(self) -> int:
        """Length of the stretch."""
        last = self.chunks[-1]
        return last.offset + last.stored - self.offset


def whole_entries(names: Iterable[str]) -> list[Want]:
    """Each entry whole, in a buffer of its name."""
    return [Want(name, None, name) for name in names]


def entry_bytes(content: Content) -> dict[str, int]:
    """Raw bytes of each entry."""
    entries = content.entries
    return {
        name: prod(shape) * ITEM_BYTES[dtype]
        for name, dtype, shape in zip(entries.name, entries.dtype, entries.shape, strict=True)
    }


def derived_bytes(content: Content) -> dict[str, int]:
    """Raw bytes of each entry that are not stored but derived; entries without any are left out."""
    found: dict[str, int] = {}
    for group in boxes.same_dimensions(content, content.slices.derived_rows):
        for row, size in zip(group.rows.tolist(), group.bytes.tolist(), strict=True):
            name = content.entries.name[int(content.slices.entry[row])]
            found[name] = found.get(name, 0) + size
    return found


def plan_reads(content: Content, wants: Iterable[Want]) -> list[ShardRead]:
    """The reads that bring all wanted boxes, every chunk once, by shard and by where it lies. Pure.

    Raises CorruptObject if the slices of a wanted box do not cover it exactly.
    """
    places: dict[int, Places] = {}
    pieces: dict[tuple[int, int], list[Piece]] = {}
    for overlap in _overlaps(content, wants):
        if overlap.shard not in places:
            places[overlap.shard] = Places.of(content.shards[overlap.shard])
        for chunk, piece in _pieces(overlap, places[overlap.shard]):
            pieces.setdefault((overlap.shard, chunk), []).append(piece)
    order = sorted(pieces, key=lambda piece: (piece[0], *places[piece[0]].order(piece[1])))
    return coalesce(
        _chunk_read(content.shards[shard], places[shard], chunk, pieces[shard, chunk]) for shard, chunk in order
    )


def plan_all(content: Content) -> list[ChunkRead]:
    """Every chunk of a checkpoint, for verification. Pure."""
    return [
        _chunk_read(shard, places, chunk, ())
        for shard in content.shards
        for places in [Places.of(shard)]
        for chunk in range(len(shard.chunks.raw))
    ]


def check_cover(content: Content) -> None:
    """CorruptObject unless the slices of every entry cover it exactly."""
    for _ in _overlaps(content, whole_entries(content.entries.name)):
        pass


class _Overlap(Struct, frozen=True, gc=False):
    """Where a slice and a wanted box meet."""

    want: Want
    shard: int
    at: int
    """Byte of the slice in the raw stream of its shard."""
    item: int
    """Bytes of an element there."""
    to_item: int
    """Bytes of an element in the buffer."""
    cast: str | None
    slice_box: Box
    want_box: Box
    box: Box


def _overlaps(content: Content, wants: Iterable[Want]) -> Iterator[_Overlap]:
    index = {name: number for number, name in enumerate(content.entries.name)}
    for layer in _layers(wants):
        yield from _layer_overlaps(content, layer, [index[want.entry] for want in layer])


def _layers(wants: Iterable[Want]) -> list[list[Want]]:
    """The wants, so that each list names an entry once."""
    layers: list[list[Want]] = []
    count: dict[str, int] = {}
    for want in wants:
        depth = count.get(want.entry, 0)
        count[want.entry] = depth + 1
        if depth == len(layers):
            layers.append([])
        layers[depth].append(want)
    return layers


def _layer_overlaps(content: Content, wants: Sequence[Want], entry_of: Sequence[int]) -> Iterator[_Overlap]:
    entries, slices = content.entries, content.slices
    want_boxes = [
        boxes.whole(entries.shape[entry]) if want.box is None else want.box
        for want, entry in zip(wants, entry_of, strict=True)
    ]
    missing = {number for number, box in enumerate(want_boxes) if 0 not in boxes.sizes(box)}
    want_of = np.full(len(entries.name), -1)
    want_of[entry_of] = np.arange(len(wants))
    rows = np.flatnonzero(want_of[slices.entry] >= 0)
    derived = set(slices.derived_rows.tolist())
    for group in boxes.same_dimensions(content, rows):
        numbers, low, extent, own = _meeting(group, want_of[slices.entry[group.rows]], want_boxes)
        _check_tiling(wants, want_boxes, numbers, low, extent)
        missing.difference_update(numbers.tolist())
        columns = (numbers, group.rows[own], np.concatenate([low, extent], axis=1), group.boxes[own])
        for number, row, box, slice_box in zip(*(part.tolist() for part in columns), strict=True):
            dtype, cast = entries.dtype[entry_of[number]], None
            item = to_item = ITEM_BYTES[dtype]
            if row in derived:
                item, cast = ITEM_BYTES[SOURCE], dtype
            yield _Overlap(
                wants[number], int(slices.shard[row]), int(slices.at[row]), item, to_item, cast,
                tuple(slice_box), want_boxes[number], tuple(box),
            )  # fmt: skip
    if missing:
        raise _gap(wants[min(missing)])


def _meeting(group: BoxGroup, numbers: Column, want_boxes: Sequence[Box]) -> tuple[Column, Matrix, Matrix, Column]:
    """Where slices meet the boxes that are wanted of their entries, in the order of these.

    Gives the want, the first index, the extent, and the row of the group.
    """
    dimensions = group.offsets.shape[1]
    wanted = np.zeros((len(want_boxes), 2 * dimensions), np.int64)
    for number in np.flatnonzero(np.bincount(numbers)).tolist():
        wanted[number] = want_boxes[number]
    begin, length = wanted[numbers, :dimensions], wanted[numbers, dimensions:]
    low = np.maximum(group.offsets, begin)
    extent = np.minimum(group.offsets + group.sizes, begin + length) - low
    meet = np.flatnonzero((extent > 0).all(axis=1))
    meet = meet[np.argsort(numbers[meet], kind="stable")]
    return numbers[meet], low[meet], extent[meet], meet


def _check_tiling(
    wants: Sequence[Want], want_boxes: Sequence[Box], numbers: Column, low: Matrix, extent: Matrix
) -> None:
    """CorruptObject unless what meets a wanted box covers it exactly."""
    used, place = np.unique(numbers, return_inverse=True)
    shape = (len(used), low.shape[1])
    first = np.array([boxes.offsets(want_boxes[n]) for n in used.tolist()], np.int64).reshape(shape)
    sizes = np.array([boxes.sizes(want_boxes[n]) for n in used.tolist()], np.int64).reshape(shape)
    for bad in boxes.untiled(place, low - first[place], extent, sizes).tolist():
        raise _gap(wants[int(used[bad])])


def _gap(want: Want) -> CorruptObject:
    return CorruptObject(
        f"the slices of entry {want.entry!r} leave a gap or overlap",
        "The checkpoint was written by a faulty program; use another one",
    )


def _pieces(overlap: _Overlap, places: Places) -> Iterator[tuple[int, Piece]]:
    """What each chunk gives to an overlap."""
    item, to_item, at, want = overlap.item, overlap.to_item, overlap.at, overlap.want
    shape, target = boxes.sizes(overlap.slice_box), boxes.sizes(overlap.want_box)
    if overlap.slice_box == overlap.want_box:
        for chunk, start, low, high in places.split(at, at + prod(shape) * item):
            _check_whole(chunk, low - at, high - at, overlap)
            to, count = want.at + (low - at) // item * to_item, (high - low) // item
            yield chunk, Piece(want.buffer, low - start, to, item, (count,), (item,), (to_item,), overlap.cast)
        return
    steps, target_steps = boxes.strides(shape), boxes.strides(target)
    strides, to_strides = [step * item for step in steps], [step * to_item for step in target_steps]
    length = boxes.sizes(overlap.box)
    begin = _minus(overlap.box, overlap.slice_box)
    shift = _minus(overlap.slice_box, overlap.want_box)
    first = _dot(begin, steps)
    last = first + _dot([size - 1 for size in length], steps)
    for chunk, start, low, high in places.split(at + first * item, at + (last + 1) * item):
        _check_whole(chunk, low - at, high - at, overlap)
        for part in boxes.flat_boxes(shape, (low - at) // item, (high - at) // item):
            corner = [max(a, b) for a, b in zip(boxes.offsets(part), begin, strict=True)]
            ends = zip(boxes.offsets(part), boxes.sizes(part), begin, length, corner, strict=True)
            sizes = [min(a + n, b + m) - c for a, n, b, m, c in ends]
            if all(size > 0 for size in sizes):
                source = at + _dot(corner, steps) * item - start
                into = [c + s for c, s in zip(corner, shift, strict=True)]
                to = want.at + _dot(into, target_steps) * to_item
                merged = _merge(sizes, strides, to_strides, (item, to_item))
                yield chunk, Piece(want.buffer, source, to, item, *merged, overlap.cast)


def _check_whole(chunk: int, low: int, high: int, overlap: _Overlap) -> None:
    if low % overlap.item or high % overlap.item:
        raise CorruptObject(f"chunk {chunk} cuts an element of entry {overlap.want.entry!r}")


def _merge(
    sizes: Sequence[int], strides: Sequence[int], to_strides: Sequence[int], items: tuple[int, int]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Shape and strides, with dimensions joined that lie together on both sides. items: bytes of an element on each."""
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
    return [a - b for a, b in zip(boxes.offsets(box), boxes.offsets(other), strict=True)]


def _dot(index: Sequence[int], steps: Sequence[int]) -> int:
    return sum(i * step for i, step in zip(index, steps, strict=True))


def _chunk_read(shard: Shard, places: Places, chunk: int, pieces: Sequence[Piece]) -> ChunkRead:
    chunks = shard.chunks
    holder, offset = places.order(chunk)
    return ChunkRead(
        shard=shard.name,
        attempt=shard.references.attempts[holder - 1] if holder and shard.references is not None else None,
        index=chunk,
        offset=offset,
        stored=places.stored[chunk],
        raw=places.raw[chunk + 1] - places.raw[chunk],
        codec=chunks.codec_of(chunk),
        digest=chunks.digest_of(chunk),
        pieces=tuple(pieces),
    )


def coalesce(chunks: Iterable[ChunkRead]) -> list[ShardRead]:
    """Chunks in the order they lie in, neighbours joined. Pure."""
    reads: list[ShardRead] = []
    current: list[ChunkRead] = []
    useful = 0
    for chunk in chunks:
        if current:
            last = current[-1]
            together = (last.shard, last.attempt) == (chunk.shard, chunk.attempt)
            span = chunk.offset + chunk.stored - current[0].offset
            gaps = span - useful - chunk.stored
            if together and span <= READ_BYTES and 0 <= gaps * _GAP_SHARE <= span:
                current.append(chunk)
                useful += chunk.stored
                continue
            reads.append(ShardRead(tuple(current)))
        current, useful = [chunk], chunk.stored
    return [*reads, ShardRead(tuple(current))] if current else reads
