"""The memory of an earlier trainer's savers on this host, as a source of the chunks of a checkpoint.

Its bytes are those before encoding. A chunk is used if the saver's answer names the digest that is in the manifest, and
if its bytes in memory still have the digest that the saver took before it encoded them. All others are left to the next
source.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from ckpt.saver.memory import Attach, HeldSnapshot, ask
from ckpt.saver.messages import Channel
from ckpt.saver.segment import Segment
from ckptstore import human
from ckptstore.codecs.chunk_codecs import RAW
from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import CorruptObject
from ckptstore.format.documents import DIGEST_BYTES
from ckptstore.format.planning import ChunkRead, ShardRead, coalesce
from ckptstore.reading.fetch import Buffers, Progress, fetch_readable
from ckptstore.stores import PARALLEL_READS, ObjectReader

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Attached:
    """The snapshot of one rank, mapped into this process."""

    snapshot: HeldSnapshot
    view: memoryview

    def find(self, chunk: ChunkRead) -> ChunkRead | None:
        """The chunk as it is in memory; None if it is not the same one."""
        held, index = self.snapshot, chunk.index
        part = slice(DIGEST_BYTES * index, DIGEST_BYTES * (index + 1))
        if index >= len(held.at) or held.raw[index] != chunk.raw or held.digests[part].hex() != chunk.digest:
            return None
        raw, digest = held.raw[index], held.raw_digests[part].hex()
        return replace(chunk, attempt=None, offset=held.at[index], stored=raw, codec=RAW, digest=digest)


class SaverMemory:
    """Snapshots of one checkpoint in the memory of this host. It stays mapped as long as this object exists."""

    name = "memory"
    parallel_reads = PARALLEL_READS
    longest_read = 0

    def __init__(self, checkpoint: Checkpoint, shards: Mapping[str, _Attached]) -> None:
        self._checkpoint = checkpoint
        self._shards = shards

    def fetch(self, reads: Sequence[ShardRead], buffers: Buffers, progress: Progress) -> list[ShardRead]:
        """Verify and place the chunks that are in memory; returns the reads of the others, and of damaged ones."""
        chunks = [chunk for read in reads for chunk in read.chunks]
        found = {(twin.shard, twin.index): twin for chunk in chunks if (twin := self._find(chunk)) is not None}
        ordered = sorted(found.values(), key=lambda twin: (twin.shard, twin.offset))
        left, error = fetch_readable(self, self._checkpoint, coalesce(ordered), buffers, progress)
        if error is not None:
            logger.warning(
                "%s in memory are damaged, and read from elsewhere: %s", human.count(len(left), "part"), error
            )
        placed = found.keys() - {(chunk.shard, chunk.index) for read in left for chunk in read.chunks}
        return coalesce(chunk for chunk in chunks if (chunk.shard, chunk.index) not in placed)

    def open_shard(self, checkpoint: Checkpoint, shard: str) -> ObjectReader:
        """A reader of the bytes before encoding."""
        return _MemoryReader(self._shards[shard].view)

    def _find(self, chunk: ChunkRead) -> ChunkRead | None:
        attached = self._shards.get(chunk.shard)
        return attached.find(chunk) if attached is not None else None


class _MemoryReader(ObjectReader):
    """Reads shared memory."""

    small_reads = True

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def read(self, offset: int, buffer: memoryview) -> None:
        """Copy; releases the GIL."""
        part = self._view[offset : offset + len(buffer)]
        if len(part) != len(buffer):
            raise CorruptObject(f"shared memory ends after {len(self._view)} bytes")
        np.copyto(np.frombuffer(buffer, np.uint8), np.frombuffer(part, np.uint8))

    def close(self) -> None:
        """Does nothing: the memory stays mapped."""


def attach(store: str, checkpoint: Checkpoint) -> SaverMemory | None:
    """The memory of savers on this host that hold the checkpoint; None if there is none.

    store: URL of the store, as the trainer that saved was given it.
    """
    question = Attach(store, checkpoint.run, str(checkpoint.attempt))
    shards: dict[str, _Attached] = {}
    for answer, channel in ask(store, checkpoint.run, question):
        if not isinstance(answer, HeldSnapshot):
            logger.debug("no memory: %s", answer)
            continue
        try:
            shards[answer.shard] = _Attached(answer, _mapped(answer, channel))
        except OSError as error:
            logger.warning("the memory of a saver cannot be used, its part is read from elsewhere: %s", error)
    return SaverMemory(checkpoint, shards) if shards else None


def _mapped(answer: HeldSnapshot, channel: Channel) -> memoryview:
    """The memory whose descriptor came with the answer. Raises OSError."""
    fd = channel.take_fd()
    if os.fstat(fd).st_size < answer.num_bytes:
        os.close(fd)
        raise OSError(f"it has fewer than {answer.num_bytes} bytes")
    segment = Segment(answer.num_bytes, fd, writable=False)
    view = segment.view.toreadonly()
    segment.close()
    return view
