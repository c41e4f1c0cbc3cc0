"""Several sources for the chunks of one checkpoint: the memory of a host, a near store, the store.

They are asked in order of preference, and each is asked for the chunks that the ones before it do not have. All verify
a chunk by the same digest, which is in the manifest. So a nearer source makes a restore faster, and can neither change
its result nor make it fail: what it lacks, or holds damaged, is read from the next one.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from ckptstore import human
from ckptstore.commits.catalog import Checkpoint
from ckptstore.format.planning import ShardRead
from ckptstore.reading.fetch import Buffers, Progress, fetch_readable
from ckptstore.reading.source import ShardSource

logger = logging.getLogger(__name__)


class ChunkSource(Protocol):
    """Something that may hold chunks of one checkpoint."""

    name: str
    """For logs: memory, near."""

    def fetch(self, reads: Sequence[ShardRead], buffers: Buffers, progress: Progress) -> list[ShardRead]:
        """Verify and place the chunks that it has; returns the reads of the others, which include damaged ones.

        Never raises for what it lacks. The buffers of returned chunks may hold anything. progress: called with the raw
        bytes just placed; from any thread.
        """


def fetch_from(
    sources: Sequence[ChunkSource], reads: Sequence[ShardRead], buffers: Buffers, progress: Progress
) -> tuple[list[ShardRead], dict[str, int]]:
    """Fetch from each source what it has; returns the reads that are left, and the raw bytes by name of the source."""
    left, found = list(reads), Counter[str]()
    for source in sources:
        before = _raw_bytes(left)
        left = source.fetch(left, buffers, progress)
        found[source.name] += before - _raw_bytes(left)
    return left, dict(found)


class StoredChunks:
    """The chunks of a checkpoint in another store that has the same objects."""

    def __init__(self, name: str, source: ShardSource, checkpoint: Checkpoint) -> None:
        self.name = name
        self._source = source
        self._checkpoint = checkpoint

    def fetch(self, reads: Sequence[ShardRead], buffers: Buffers, progress: Progress) -> list[ShardRead]:
        """Fetch what can be read. One warning if anything cannot."""
        left, error = fetch_readable(self._source, self._checkpoint, reads, buffers, progress)
        if error is not None:
            logger.warning(
                "%s of %s are read from elsewhere, since the %s source does not have them: %s",
                human.size(_raw_bytes(left)), self._checkpoint.id, self.name, error,
            )  # fmt: skip
        return left


def _raw_bytes(reads: Sequence[ShardRead]) -> int:
    return sum(chunk.raw for read in reads for chunk in read.chunks)
