"""Reading ahead: stored bytes of a checkpoint, read into host memory before it is known where they go.

Each chunk is checked when it arrives. What is damaged or could not be read is read again from the source, by the thread
that needs it. Readers check again.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from copy import copy
from functools import partial

from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import CkptError
from ckptstore.format.documents import Content
from ckptstore.format.planning import ChunkRead, ShardRead, coalesce, plan_all
from ckptstore.reading.fetch import check_chunk, fetch_stored
from ckptstore.reading.source import ShardSource
from ckptstore.stores import ObjectReader

_File = tuple[str, str | None]
"""A shard, and the attempt that stores it as in `ChunkRead.attempt`."""

_NOT_READ = (CancelledError, CkptError, MemoryError)


def likely_reads(content: Content, rank: int, size: int, max_bytes: int) -> list[ShardRead]:
    """What a rank of `size` ranks will probably have to read, in order, up to `max_bytes`. Pure.

    All ranks together: every chunk once, if it is not too much. The ranks that hold copies of the same part of the
    state divide its shard evenly. If the number of ranks is not a multiple of that of the shards, all chunks are
    divided.
    """
    shards = len(content.shards)
    chunks = plan_all(content)
    if shards and size % shards == 0:
        name = content.shards[rank % shards].name
        chunks = [chunk for chunk in chunks if chunk.shard == name]
        rank, size = rank // shards, size // shards
    return list(_within(coalesce(_by_place(_part(chunks, rank, size))), max_bytes))


def _part(chunks: Sequence[ChunkRead], rank: int, size: int) -> Iterator[ChunkRead]:
    """The chunks whose middle is in the rank's part of all stored bytes."""
    total, at = sum(chunk.stored for chunk in chunks), 0
    for chunk in chunks:
        if (2 * at + chunk.stored) * size // max(1, 2 * total) == rank:
            yield chunk
        at += chunk.stored


def _by_place(chunks: Iterable[ChunkRead]) -> list[ChunkRead]:
    return sorted(chunks, key=lambda chunk: (chunk.shard, chunk.attempt or "", chunk.offset))


def _within(reads: Iterable[ShardRead], max_bytes: int) -> Iterator[ShardRead]:
    for read in reads:
        max_bytes -= read.bytes
        if max_bytes < 0:
            return
        yield read


class _Block:
    """One read."""

    def __init__(self, read: ShardRead, data: Future[memoryview]) -> None:
        self.read = read
        self.data = data
        self.left = read.bytes
        """Bytes that no reader has taken yet."""


class ReadAhead:
    """A source of one checkpoint, part of which is in host memory, or on its way there. For any thread.

    Memory is released as its bytes are taken: each range is expected to be read once.
    """

    def __init__(self, source: ShardSource, checkpoint: Checkpoint, reads: Sequence[ShardRead]) -> None:
        """Begin to read. The memory that is used is at most that of the reads."""
        self.parallel_reads, self.longest_read = source.parallel_reads, source.longest_read
        self.chunks = frozenset((chunk.shard, chunk.index) for read in reads for chunk in read.chunks)
        """Shard and number of each chunk."""
        self._source = source
        self._checkpoint = checkpoint
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(max(1, min(source.parallel_reads, len(reads))), thread_name_prefix="ckpt-ahead")
        self._blocks: dict[_File, list[_Block]] = {}
        for read in reads:
            block = _Block(read, self._pool.submit(self._fetch, read))
            self._blocks.setdefault((read.shard, read.attempt), []).append(block)

    def open_shard(self, checkpoint: Checkpoint, shard: str) -> ObjectReader:
        """A reader that takes what it can from memory."""
        own = (checkpoint.run, checkpoint.attempt) == (self._checkpoint.run, self._checkpoint.attempt)
        blocks = self._blocks.get((shard, None if own else str(checkpoint.attempt)))
        if not blocks:
            return self._source.open_shard(checkpoint, shard)
        return _AheadReader(self, blocks, self._source, checkpoint, shard)

    def over(self, source: ShardSource) -> ReadAhead:
        """The same memory, over another source of the same bytes."""
        other = copy(self)
        other.parallel_reads, other.longest_read, other._source = source.parallel_reads, source.longest_read, source
        return other

    def wait(self) -> int:
        """Return when all reads have ended. The number of bytes that are held now."""
        held = 0
        for block in [block for blocks in self._blocks.values() for block in blocks]:
            try:
                held += len(block.data.result())
            except _NOT_READ:
                pass
        return held

    def close(self) -> None:
        """Begin no more reads, and release all memory."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._blocks.clear()

    def take(self, block: _Block, offset: int, into: memoryview) -> bool:
        """Copy bytes of a block, once they are there; False if they have to be read from the source."""
        if block.data.cancel():
            return False  # not begun: the thread that needs it reads it itself
        try:
            data = block.data.result()
        except _NOT_READ:
            return False
        begin = offset - block.read.offset
        into[:] = data[begin : begin + len(into)]
        with self._lock:
            block.left -= len(into)
            if block.left <= 0:
                block.data = Future()
                block.data.cancel()
        return True

    def _fetch(self, read: ShardRead) -> memoryview:
        stored = fetch_stored(self._source, self._checkpoint, read)
        for chunk in read.chunks:
            check_chunk(self._checkpoint, chunk, stored[chunk.offset - read.offset :][: chunk.stored])
        return stored


class _AheadReader(ObjectReader):
    """Reads one shard from blocks in memory, and what is not there from the source."""

    def __init__(
        self, ahead: ReadAhead, blocks: Sequence[_Block], source: ShardSource, checkpoint: Checkpoint, shard: str
    ) -> None:
        self._ahead = ahead
        self._blocks = blocks
        self._offsets = [block.read.offset for block in blocks]
        self._open = partial(source.open_shard, checkpoint, shard)
        self._reader: ObjectReader | None = None

    def read(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer, block by block."""
        end = offset + len(buffer)
        while offset < end:
            block, until = self._at(offset)
            count = min(end, until) - offset
            if block is None or not self._ahead.take(block, offset, buffer[:count]):
                self._read_source(offset, buffer[:count])
            offset, buffer = offset + count, buffer[count:]

    def close(self) -> None:
        """Close the reader of the source, if there is one."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def _at(self, offset: int) -> tuple[_Block | None, int]:
        """The block with this byte, if there is one, and where it ends, or the next one begins."""
        number = bisect_right(self._offsets, offset)
        if number:
            block = self._blocks[number - 1]
            end = block.read.offset + block.read.bytes
            if offset < end:
                return block, end
        return None, self._offsets[number] if number < len(self._offsets) else 1 << 62

    def _read_source(self, offset: int, buffer: memoryview) -> None:
        self._reader = self._reader or self._open()
        self._reader.read(offset, buffer)
