"""Locations of the chunks of a shard: in its raw stream, and in its own file or files of earlier checkpoints. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ckptstore.format.columns import Column, column, concatenate
from ckptstore.format.documents import Content, Shard


@dataclass(frozen=True, slots=True)
class Places:
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


@dataclass(frozen=True, slots=True)
class ChunkTable:
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
