"""The shard file: a raw stream of slices, cut into chunks that are encoded independently and stored back to back.

Slices are in descending order of element size, so each is aligned in the raw stream without padding, and a chunk never
mixes element types. A chunk lies in the shard's own file, or in those of earlier checkpoints. Planning is pure;
`encode_chunk` does the work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple, Protocol

import numpy as np
import xxhash
from msgspec.structs import replace

from ckptstore.codecs import delta
from ckptstore.codecs.chunk_codecs import RAW, Buffer, Coding, encode
from ckptstore.codecs.dtypes import ITEM_BYTES, Extremes, ignore
from ckptstore.codecs.float_split import scan
from ckptstore.format import boxes
from ckptstore.format.boxes import Box
from ckptstore.format.columns import Column, column, concatenate
from ckptstore.format.documents import Bases, Chunks, Content, Entries, References, Shard, Slices, digest
from ckptstore.values import Value

CHUNK_BYTES = 8 << 20
"""Largest raw size of a chunk."""
EVEN_PARTS = (2, 4, 8)
"""Chunks end at even splits of an entry's first dimension into these numbers of parts, so that ranks which hold such
parts read whole chunks and nothing else."""
_OWN_CHUNK_BYTES = 64 << 10
"""A slice of at least this size starts its own chunk. Smaller parts of a slice are not split off."""
_SHARED_CHUNK_BYTES = 1 << 20
"""Largest chunk of several smaller slices."""
_BLOCK_BYTES = 256 << 10
"""The size of a chunk that ends only because of CHUNK_BYTES is a multiple of this."""


class Slice(Value, array_like=True):
    """A box of an entry, to be stored by one writer."""

    entry: str
    dtype: str
    shape: tuple[int, ...]
    """Shape of the entry."""
    box: Box

    @staticmethod
    def whole(entry: str, dtype: str, shape: tuple[int, ...]) -> Slice:
        """The slice of a whole entry."""
        return Slice(entry, dtype, shape, boxes.whole(shape))

    @property
    def bytes(self) -> int:
        """Raw bytes of the slice."""
        return prod(self.box[len(self.shape) :]) * ITEM_BYTES[self.dtype]


class Placed(Value, array_like=True):
    """A slice and its offset in the raw stream of its shard."""

    slice: Slice
    at: int


class RawStream(Protocol):
    """The raw stream of a shard: memory, or state that is read where it lies."""

    def __getitem__(self, part: slice, /) -> memoryview:
        """The bytes of a range, whose start and stop are given."""


class ChunkSpan(Value):
    """A range of the raw stream that becomes one chunk."""

    at: int
    bytes: int
    dtype: str
    shared: bool = False
    """The chunk contains small slices, and more may be added."""

    def of(self, raw: RawStream) -> memoryview:
        """The chunk's bytes of the raw stream."""
        return raw[self.at : self.at + self.bytes]


class EncodedChunk(Value):
    """A chunk ready to be written."""

    data: Buffer
    raw: int
    stored: int
    codec: str
    digest: str
    raw_digest: str = ""
    """xxh3-128 of the bytes before encoding, as `digest`; empty if it was not taken."""


def place_slices(slices: Iterable[Slice]) -> list[Placed]:
    """Order and offsets of slices in a raw stream. Pure and deterministic."""
    ordered = sorted(slices, key=lambda piece: (-ITEM_BYTES[piece.dtype], piece.dtype))
    placed, at = [], 0
    for piece in ordered:
        placed.append(Placed(piece, at))
        at += piece.bytes
    return placed


def plan_chunks(placed: Sequence[Placed]) -> list[ChunkSpan]:
    """Cut the raw stream into chunks: no gaps, one element type per chunk, whole elements. Pure."""
    spans: list[ChunkSpan] = []
    for place in placed:
        size, dtype = place.slice.bytes, place.slice.dtype
        last = spans[-1] if spans else ChunkSpan(0, 0, "")
        may_share = last.shared and last.dtype == dtype and last.at + last.bytes == place.at
        if size >= _OWN_CHUNK_BYTES:
            spans += [ChunkSpan(place.at + start, end - start, dtype) for start, end in pairwise(_cuts(place.slice))]
        elif may_share and last.bytes + size <= _SHARED_CHUNK_BYTES:
            spans[-1] = ChunkSpan(last.at, last.bytes + size, dtype, shared=True)
        elif size:
            spans.append(ChunkSpan(place.at, size, dtype, shared=True))
    return spans


def _cuts(piece: Slice) -> Iterator[int]:
    """Byte offsets in a large slice where chunks begin, and its end."""
    yield 0
    start = 0
    for end in [*_even_cuts(piece), piece.bytes]:
        count = -(-(end - start) // CHUNK_BYTES)
        size = -(-(end - start) // (count * _BLOCK_BYTES)) * _BLOCK_BYTES
        yield from range(start + size, end, size)
        yield end
        start = end


def _even_cuts(piece: Slice) -> list[int]:
    """Byte offsets in a slice where even parts of the entry's first dimension end."""
    if not piece.shape:
        return []
    first, rows = boxes.offsets(piece.box)[0], boxes.sizes(piece.box)[0]
    row_bytes = piece.bytes // rows
    ends: set[int] = set()
    for parts in EVEN_PARTS:
        step = -(-piece.shape[0] // parts)
        if step * row_bytes >= _OWN_CHUNK_BYTES:
            ends.update(range((first // step + 1) * step, first + rows, step))
    return [(row - first) * row_bytes for row in sorted(ends)]


def encode_chunk(
    raw: memoryview, coding: Coding, extremes: Extremes | None = None, hashes_raw: bool = False
) -> EncodedChunk:
    """Encode and hash the bytes of one chunk. The result may alias them. extremes: see codecs.encode.

    hashes_raw: also take the digest of the bytes before encoding, each part before it is encoded.
    """
    if coding.codec == RAW and extremes is not None:
        found = scan(raw, extremes)
        return EncodedChunk(raw, len(raw), len(raw), RAW, found, found)
    seen = xxhash.xxh3_128()
    codec, data = encode(coding.codec, raw, coding.level, extremes, seen.update if hashes_raw else ignore)
    stored_digest = raw_digest = digest(data)
    if codec != RAW:
        data = memoryview(data).toreadonly()  # no other references exist
        raw_digest = seen.hexdigest() if hashes_raw else ""
    return EncodedChunk(data, len(raw), len(data), codec, stored_digest, raw_digest)


def delta_of(raw: memoryview, base: Buffer, span: ChunkSpan, whole: EncodedChunk) -> EncodedChunk:
    """The chunk as a delta of a base, if that is smaller than `whole`, which has its raw digest; else `whole`."""
    data = delta.encode(raw, base, ITEM_BYTES[span.dtype])
    if len(data) >= whole.stored:
        return whole
    return replace(whole, data=data, stored=len(data), codec=delta.DELTA, digest=digest(data))


class StoredChunk(NamedTuple):
    """A chunk in the shard file of an attempt."""

    attempt: str
    offset: int
    chunk: EncodedChunk
    """Without its data."""


BasesByChunk = Mapping[int, Sequence[StoredChunk]]
"""The chunks that the deltas of a shard are decoded on, in order, by the number of the delta."""


def base_table(bases: BasesByChunk) -> Bases | None:
    """The columns that describe the bases of a shard in its receipt."""
    rows = [(number, base) for number in sorted(bases) for base in bases[number]]
    references = reference_table((at, base.attempt, base.offset) for at, (_, base) in enumerate(rows))
    if references is None:
        return None
    return Bases(column(number for number, _ in rows), chunk_table([base.chunk for _, base in rows]), references)


def bases_of(shard: Shard) -> BasesByChunk:
    """The bases from the document of a shard."""
    found: dict[int, list[StoredChunk]] = {}
    if (table := shard.bases) is not None:
        columns = (table.of.tolist(), table.references.attempt.tolist(), table.references.offset.tolist())
        for number, attempt, offset, chunk in zip(*columns, rows_of(table.chunks), strict=True):
            found.setdefault(number, []).append(StoredChunk(table.references.attempts[attempt], offset, chunk))
    return found


def reference_table(rows: Iterable[tuple[int, str, int]]) -> References | None:
    """The columns that describe references: number of a chunk, ascending, its attempt, and its offset there."""
    found = list(rows)
    attempts = sorted({attempt for _, attempt, _ in found})
    references = References(
        attempts=attempts,
        chunk=column(number for number, _, _ in found),
        attempt=column(attempts.index(attempt) for _, attempt, _ in found),
        offset=column(offset for _, _, offset in found),
    )
    return references if found else None


def chunk_table(chunks: Sequence[EncodedChunk]) -> Chunks:
    """The columns that describe the chunks of a shard in its receipt."""
    codecs = sorted({chunk.codec for chunk in chunks})
    return Chunks(
        raw=column(chunk.raw for chunk in chunks),
        stored=column(chunk.stored for chunk in chunks),
        codec=column(codecs.index(chunk.codec) for chunk in chunks),
        codecs=codecs,
        digest=bytes.fromhex("".join(chunk.digest for chunk in chunks)),
    )


def rows_of(chunks: Chunks) -> Iterator[EncodedChunk]:
    """The chunks of a table, without their data."""
    for number, (raw, stored) in enumerate(zip(chunks.raw.tolist(), chunks.stored.tolist(), strict=True)):
        yield EncodedChunk(b"", raw, stored, chunks.codec_of(number), chunks.digest_of(number))


def slice_tables(
    stored: Sequence[Placed], derived: Sequence[Placed] = (), second: Sequence[Placed] = ()
) -> tuple[Entries, Slices]:
    """The columns that describe the slices of a rank in its receipt: of its first shard, of the second, if there
    are two, and those derived from the first's, placed at their sources."""
    placed = [*stored, *second, *derived]
    first_derived = len(stored) + len(second)
    index: dict[str, int] = {}
    entries = Entries(name=[], dtype=[], shape=[])
    for place in placed:
        piece = place.slice
        if piece.entry not in index:
            index[piece.entry] = len(index)
            entries.name.append(piece.entry)
            entries.dtype.append(piece.dtype)
            entries.shape.append(list(piece.shape))
    slices = Slices(
        entry=column(index[place.slice.entry] for place in placed),
        shard=column(int(len(stored) <= row < first_derived) for row in range(len(placed))),
        at=column(place.at for place in placed),
        box=column(number for place in placed for number in place.slice.box),
        derived=column(range(first_derived, len(placed))) if derived else None,
    )
    return entries, slices


def raw_bytes(placed: Sequence[Placed]) -> int:
    """Length of the raw stream."""
    return placed[-1].at + placed[-1].slice.bytes if placed else 0


class Places(NamedTuple):
    """The locations of all chunks of one shard."""

    raw: list[int]
    """Offset of each chunk in the raw stream; one additional element marks the end."""
    holder: list[int]
    """The file of its stored bytes: 0 for the shard's own, otherwise 1 + an index into its references' attempts."""
    offset: list[int]
    """Offset of the stored bytes in that file."""
    stored: list[int]
    """Number of stored bytes."""

    @staticmethod
    def of(shard: Shard) -> Places:
        """The locations from the document of a shard."""
        raw = np.append(0, np.cumsum(shard.chunks.raw))
        holder, offset = _holder_and_offset(shard)
        return Places(raw.tolist(), holder.tolist(), offset.tolist(), shard.chunks.stored.tolist())

    def order(self, chunk: int) -> tuple[int, int]:
        """Sort key: file, then offset in it."""
        return self.holder[chunk], self.offset[chunk]

    def adjoins(self, chunk: int) -> bool:
        """Whether it directly follows the previous chunk."""
        holder, offset = self.order(chunk - 1)
        return self.order(chunk) == (holder, offset + self.stored[chunk - 1])


class ChunkTable(Value):
    """The locations of all chunks of several shards, as columns; rows are grouped by shard."""

    shard: Column
    """Number of the shard."""
    index: Column
    """Number of the chunk in its shard."""
    begin: Column
    """Offset in the joined stream: the raw streams of all shards in this order."""
    raw: Column
    stored: Column
    holder: Column
    offset: Column
    """As in Places."""
    streams: Column
    """By number of a shard: offset of its raw stream in the joined stream."""

    @staticmethod
    def of(content: Content, numbers: Sequence[int]) -> ChunkTable:
        """The table of the shards with these numbers."""
        shards = [content.shards[number] for number in numbers]
        counts = column(len(shard.chunks.raw) for shard in shards)
        first = np.cumsum(counts) - counts
        raw = concatenate(shard.chunks.raw for shard in shards)
        ends = np.append(0, np.cumsum(raw))
        streams = np.zeros(len(content.shards), np.int64)
        streams[numbers] = ends[first]
        places = [_holder_and_offset(shard) for shard in shards]
        return ChunkTable(
            shard=np.repeat(np.asarray(numbers, np.int64), counts),
            index=np.arange(len(raw)) - np.repeat(first, counts),
            begin=ends[:-1],
            raw=raw,
            stored=concatenate(shard.chunks.stored for shard in shards),
            holder=concatenate(holder for holder, _ in places),
            offset=concatenate(offset for _, offset in places),
            streams=streams,
        )

    def split(self, begin: Column, end: Column) -> tuple[Column, Column, Column, Column]:
        """Split ranges of the joined stream by chunk: number of the range, row of the chunk, first byte, end."""
        first = np.searchsorted(self.begin, begin, "right") - 1
        counts = np.searchsorted(self.begin, end, "left") - first
        which = np.repeat(np.arange(len(begin)), counts)
        row = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts) + first[which]
        low = np.maximum(begin[which], self.begin[row])
        return which, row, low, np.minimum(end[which], self.begin[row] + self.raw[row])

    def sorted(self, rows: Column) -> Column:
        """The rows sorted by shard, file, and offset in the file."""
        return rows[np.lexsort((self.offset[rows], self.holder[rows], self.shard[rows]))]


def _holder_and_offset(shard: Shard) -> tuple[Column, Column]:
    stored, references = shard.chunks.stored, shard.references
    holder = np.zeros(len(stored), np.int64)
    if references is None:
        return holder, np.cumsum(stored) - stored
    holder[references.chunk] = references.attempt + 1
    own = np.where(holder == 0, stored, 0)
    offset = np.cumsum(own) - own
    offset[references.chunk] = references.offset
    return holder, offset
