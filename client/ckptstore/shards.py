"""The shard file: a raw stream of entries cut into chunks, each encoded on its own, back to back.

Entries are ordered by falling element size, so that every entry is aligned in the raw stream without
padding, and a chunk never mixes element types. Planning is pure; `encode_chunk` does the work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from ckptstore.codecs import Buffer, best_codec, encode
from ckptstore.documents import Chunks, Entries, Slices, digest
from ckptstore.dtypes import ITEM_BYTES

CHUNK_BYTES = 8 << 20
"""Raw size of a full chunk."""
_OWN_CHUNK_BYTES = 1 << 20
"""An entry of at least this size starts a chunk of its own; smaller ones share."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor or array to be stored whole."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size of its elements."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Placed:
    """An entry and where it begins in the raw stream of its shard."""

    entry: Entry
    at: int


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """A stretch of the raw stream that becomes one chunk."""

    at: int
    bytes: int
    dtype: str


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """A chunk ready to be written."""

    data: Buffer
    raw: int
    stored: int
    codec: str
    digest: str


def place_entries(entries: Iterable[Entry]) -> list[Placed]:
    """The order and offsets of entries in a raw stream. Pure; equal input gives equal output."""
    ordered = sorted(entries, key=lambda entry: (-ITEM_BYTES[entry.dtype], entry.dtype))
    placed, at = [], 0
    for entry in ordered:
        placed.append(Placed(entry, at))
        at += entry.bytes
    return placed


def plan_chunks(placed: Sequence[Placed]) -> list[ChunkSpan]:
    """How to cut the raw stream: without gaps, one element type per chunk, whole elements. Pure."""
    spans: list[ChunkSpan] = []
    for place in placed:
        at, end, dtype = place.at, place.at + place.entry.bytes, place.entry.dtype
        while at < end:
            size = min(end - at, CHUNK_BYTES)
            last = spans[-1] if spans else None
            joins = last is not None and last.dtype == dtype and place.entry.bytes < _OWN_CHUNK_BYTES
            if last is not None and joins and last.bytes + size <= CHUNK_BYTES:
                spans[-1] = ChunkSpan(last.at, last.bytes + size, dtype)
            else:
                spans.append(ChunkSpan(at, size, dtype))
            at += size
    return spans


def encode_chunk(raw: memoryview, span: ChunkSpan, compress: bool) -> EncodedChunk:
    """Encode and hash one chunk of a raw stream. The result may alias `raw`."""
    codec, parts = encode(best_codec(span.dtype) if compress else "raw", raw[span.at : span.at + span.bytes])
    data = parts[0] if len(parts) == 1 else b"".join(parts)
    return EncodedChunk(data, span.bytes, len(data), codec, digest(data))


def chunk_table(chunks: Sequence[EncodedChunk]) -> Chunks:
    """The columns that describe the chunks of a shard in its receipt."""
    return Chunks(
        raw=[chunk.raw for chunk in chunks],
        stored=[chunk.stored for chunk in chunks],
        codec=[chunk.codec for chunk in chunks],
        digest=[chunk.digest for chunk in chunks],
    )


def entry_tables(placed: Sequence[Placed]) -> tuple[Entries, Slices]:
    """The columns that describe whole entries of one shard in its receipt."""
    entries = Entries(
        name=[place.entry.name for place in placed],
        dtype=[place.entry.dtype for place in placed],
        shape=[list(place.entry.shape) for place in placed],
    )
    slices = Slices(
        entry=list(range(len(placed))),
        shard=[0] * len(placed),
        at=[place.at for place in placed],
        box=[None] * len(placed),
    )
    return entries, slices


def raw_bytes(placed: Sequence[Placed]) -> int:
    """Length of the raw stream."""
    return placed[-1].at + placed[-1].entry.bytes if placed else 0
