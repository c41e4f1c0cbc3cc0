"""Where the chunks of a shard lie: in its raw stream, and in its own file or those of earlier checkpoints. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ckptstore.format.documents import Shard


@dataclass(frozen=True, slots=True)
class Places:
    """The places of all chunks of one shard."""

    raw: list[int]
    """Where each begins in the raw stream; one more element marks the end."""
    holder: list[int]
    """Whose file its stored bytes lie in: 0 for the shard's own, else one more than an index into its references."""
    offset: list[int]
    """Where they begin in that file."""
    stored: list[int]
    """How many they are."""

    @staticmethod
    def of(shard: Shard) -> Places:
        """What the document of a shard says."""
        stored, references = shard.chunks.stored, shard.references
        raw = np.append(0, np.cumsum(shard.chunks.raw))
        holder = np.zeros(len(stored), np.int64)
        if references is None:
            offset = np.cumsum(stored) - stored
            return Places(raw.tolist(), holder.tolist(), offset.tolist(), stored.tolist())
        holder[references.chunk] = references.attempt + 1
        own = np.where(holder == 0, stored, 0)
        offset = np.cumsum(own) - own
        offset[references.chunk] = references.offset
        return Places(raw.tolist(), holder.tolist(), offset.tolist(), stored.tolist())

    def order(self, chunk: int) -> tuple[int, int]:
        """By file, and by where it lies in it."""
        return self.holder[chunk], self.offset[chunk]

    def adjoins(self, chunk: int) -> bool:
        """Whether it lies right behind the chunk before."""
        holder, offset = self.order(chunk - 1)
        return self.order(chunk) == (holder, offset + self.stored[chunk - 1])

    def split(self, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """The bytes [at, end) of the raw stream by chunk: (chunk, where it begins, first byte, end)."""
        chunk = bisect_right(self.raw, at) - 1
        while at < end:
            begin, stop = self.raw[chunk], min(end, self.raw[chunk + 1])
            yield chunk, begin, at, stop
            at, chunk = stop, chunk + 1
