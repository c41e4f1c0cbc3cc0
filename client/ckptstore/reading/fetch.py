"""Reading: fetch what was planned, verify, decode, place.

Every chunk is checked against its checksum before it counts. Uncompressed ones are read from local disks straight
into their destination and checked there; all others before a byte of them reaches it. Chunks that lie together are
read at once, however many tensors they belong to: what costs time there is the interpreter, not the bytes.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import numpy as np
import xxhash

from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import CkptError, CorruptObject
from ckptstore.format.casting import cast_into
from ckptstore.format.codecs import RAW, decode
from ckptstore.format.documents import digest
from ckptstore.format.planning import READ_BYTES, ChunkRead, Piece, ShardRead, join
from ckptstore.reading.source import Source
from ckptstore.stores import PARALLEL_READS, ObjectReader

Progress = Callable[[int], None]
"""Called with the number of raw bytes just done; from any thread."""
Buffers = Mapping[str, memoryview]
"""Writable bytes by the names that pieces give."""


class Receiver(Mapping[str, memoryview]):
    """Buffers of which some are not memory of the host, so that their bytes pass through memory that is lent."""

    @abstractmethod
    def divide(self, read: ShardRead) -> Iterable[ShardRead]:
        """Parts of a stretch, each of which there is memory for."""

    @abstractmethod
    def receive(self, read: ShardRead) -> AbstractContextManager[tuple[ShardRead, Buffers]]:
        """Such a part, with lent memory in the place of what is not the host's. What lies there at the end of the block
        is sent on, unless it raised."""


_CACHED_BYTES = 1 << 20
"""Read at once; stays in a processor's cache until it is hashed."""
DEFAULT_THREADS = PARALLEL_READS
_ELEMENTS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


class Scratch:
    """Memory for the bytes of one chunk or stretch at a time, used again and again by one thread."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def take(self, num_bytes: int) -> memoryview:
        """Writable, of this size; what was taken before is given up."""
        if len(self._memory) < num_bytes:
            self._memory = np.empty(num_bytes, np.uint8).data
        return self._memory[:num_bytes]


def fetch(
    source: Source,
    checkpoint: Checkpoint,
    reads: Sequence[ShardRead],
    buffers: Buffers,
    progress: Progress = lambda _: None,
    threads: int | None = None,
) -> None:
    """Fetch, verify and decode the chunks, and place their pieces. threads: None for what suits the source.

    Returns when all bytes are checked and placed. On the first error the rest is given up, and buffers hold a
    mixture, damaged bytes among it.
    """
    threads = threads or source.parallel_reads
    if isinstance(buffers, Receiver):
        reads = [part for read in reads for part in buffers.divide(read)]
    elif source.longest_read:
        # About two for each thread at least: whoever is done first takes over from the others.
        share = min(source.longest_read, sum(read.bytes for read in reads) // (2 * threads))
        reads = join(reads, share + READ_BYTES // 2)
    threads = max(1, min(threads, len(reads)))
    stretches = Stretches(reads, threads)
    stop = threading.Event()

    def work(thread: int) -> None:
        try:
            with _Fetch(source, checkpoint, progress) as one:
                while not stop.is_set() and (read := stretches.take(thread)) is not None:
                    with received(read, buffers) as (part, one.buffers):
                        one.fetch(part)
        except BaseException:  # an interrupt as well: the pool waits for all that is begun
            stop.set()
            raise

    with ThreadPoolExecutor(threads, thread_name_prefix="ckpt-fetch") as pool:
        others = [pool.submit(work, thread) for thread in range(1, threads)]
        work(0)
        for other in others:
            other.result()


def received(read: ShardRead, buffers: Buffers) -> AbstractContextManager[tuple[ShardRead, Buffers]]:
    """What to read, and buffers of the host to put it into; at the end of the block it is on its way to `buffers`."""
    return buffers.receive(read) if isinstance(buffers, Receiver) else nullcontext((read, buffers))


class _Fetch:
    """What one thread has open."""

    def __init__(self, source: Source, checkpoint: Checkpoint, progress: Progress) -> None:
        self.buffers: Buffers = {}
        self._source = source
        self._checkpoint = checkpoint
        self._progress = progress
        self._stored, self._raw = Scratch(), Scratch()
        self._shard: ObjectReader | None = None
        self._opened: tuple[str, str | None] | None = None

    def __enter__(self) -> _Fetch:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def fetch(self, read: ShardRead) -> None:
        """All chunks of a stretch, to where they go."""
        shard = self._open(read)
        shard.expect(read.offset, read.bytes)
        if not shard.small_reads:
            stored = self._stored.take(read.bytes)
            shard.read(read.offset, stored)
            for chunk in read.chunks:
                self._place(chunk, stored[chunk.offset - read.offset :][: chunk.stored])
                self._progress(chunk.raw)
            return
        for chunks in _together(read.chunks):
            first = chunks[0]
            target = _own_memory(first, self.buffers) if first.codec == RAW else None
            if target is not None and first.stored > _CACHED_BYTES:
                self._read_into(shard, first, target)
            else:
                self._read_together(shard, chunks)
            self._progress(sum(chunk.raw for chunk in chunks))

    def _open(self, read: ShardRead) -> ObjectReader:
        if self._shard is None or self._opened != (read.shard, read.attempt):
            self._close()
            self._shard = self._source.open_shard(self._checkpoint.holder(read.attempt), read.shard)
            self._opened = read.shard, read.attempt
        return self._shard

    def _close(self) -> None:
        shard, self._shard = self._shard, None
        if shard is not None:
            shard.close()

    def _read_together(self, shard: ObjectReader, chunks: Sequence[ChunkRead]) -> None:
        """Read chunks that adjoin, each raw one where it belongs, and check them while they are in the cache."""
        rest = self._stored.take(sum(chunk.stored for chunk in chunks))
        parts, placed = [], []
        for chunk in chunks:
            part = _own_memory(chunk, self.buffers) if chunk.codec == RAW else None
            placed.append(part is not None)
            if part is None:
                part, rest = rest[: chunk.stored], rest[chunk.stored :]
            parts.append(part)
        shard.read_parts(chunks[0].offset, parts)
        for chunk, part, is_placed in zip(chunks, parts, placed, strict=True):
            if is_placed:
                check_chunk(self._checkpoint, chunk, part)
            else:
                self._place(chunk, part)

    def _read_into(self, shard: ObjectReader, chunk: ChunkRead, target: memoryview) -> None:
        """The same for one that is too large to stay in the cache: part by part."""
        seen = xxhash.xxh3_128()
        for at in range(0, chunk.stored, _CACHED_BYTES):
            part = target[at : at + _CACHED_BYTES]
            shard.read(chunk.offset + at, part)
            seen.update(part)
        if seen.hexdigest() != chunk.digest:
            raise _wrong(self._checkpoint, chunk)

    def _place(self, chunk: ChunkRead, stored: memoryview) -> None:
        place_chunk(self._checkpoint, chunk, stored, self.buffers, self._raw)


def _together(chunks: Iterable[ChunkRead]) -> Iterator[list[ChunkRead]]:
    """Runs of chunks without gaps that are read at once."""
    run: list[ChunkRead] = []
    end = size = 0
    for chunk in chunks:
        if run and (chunk.offset != end or size + chunk.stored > _CACHED_BYTES):
            yield run
            run, size = [], 0
        run.append(chunk)
        size += chunk.stored
        end = chunk.offset + chunk.stored
    yield run


def fetch_stored(source: Source, checkpoint: Checkpoint, read: ShardRead) -> memoryview:
    """The stored bytes of a stretch, unchecked. Raises CorruptObject, ObjectMissing or Unavailable."""
    stored = np.empty(read.bytes, np.uint8).data
    with source.open_shard(checkpoint.holder(read.attempt), read.shard) as shard:
        shard.read(read.offset, stored)
    return stored


def check_chunk(checkpoint: Checkpoint, chunk: ChunkRead, stored: memoryview) -> None:
    """CorruptObject unless the stored bytes are those that were written."""
    if digest(stored) != chunk.digest:
        raise _wrong(checkpoint, chunk)


def place_chunk(
    checkpoint: Checkpoint, chunk: ChunkRead, stored: memoryview, buffers: Buffers, scratch: Scratch | None = None
) -> None:
    """Check and decode one chunk, and place its pieces. Raises CorruptObject, before anything is placed."""
    check_chunk(checkpoint, chunk, stored)
    target = _own_memory(chunk, buffers)
    if target is not None:
        _decode(checkpoint, chunk, stored, target)
        return
    raw = stored
    if chunk.codec != RAW:
        raw = (scratch or Scratch()).take(chunk.raw)
        _decode(checkpoint, chunk, stored, raw)
    for piece in chunk.pieces:
        _place(piece, raw, buffers[piece.buffer])


def _own_memory(chunk: ChunkRead, buffers: Buffers) -> memoryview | None:
    """Where the decoded bytes of the chunk lie in the end, if it is one place."""
    first = chunk.pieces[0]
    if len(chunk.pieces) == 1 and first.is_flat and first.shape[0] * first.item == chunk.raw:
        return buffers[first.buffer][first.to : first.to + chunk.raw]
    return None


def _wrong(checkpoint: Checkpoint, chunk: ChunkRead) -> CorruptObject:
    return CorruptObject(f"{chunk.name} of {checkpoint.id} does not match its checksum")


def _place(piece: Piece, raw: memoryview, buffer: memoryview) -> None:
    if piece.is_flat:
        buffer[piece.to : piece.to + piece.bytes] = raw[piece.at : piece.at + piece.bytes]
        return
    kind = _ELEMENTS[piece.item]
    source = np.ndarray(piece.shape, kind, raw, piece.at, piece.from_strides)
    if piece.cast is not None:
        cast_into(source, piece.cast, np.ndarray(piece.shape, np.uint16, buffer, piece.to, piece.to_strides))
        return
    np.ndarray(piece.shape, kind, buffer, piece.to, piece.to_strides)[...] = source


def _decode(checkpoint: Checkpoint, chunk: ChunkRead, stored: memoryview, into: memoryview) -> None:
    try:
        decode(chunk.codec, stored, into)
    except CkptError as error:
        raise CorruptObject(f"{chunk.name} of {checkpoint.id}: {error.message}") from error


_T = TypeVar("_T")


class Stretches(Generic[_T]):
    """Items in order, for several threads. Disks and kernels like readers that go straight on.

    Who has done his own stretch takes over the back half of the longest that is left.
    """

    def __init__(self, items: Sequence[_T], threads: int) -> None:
        cuts = [len(items) * thread // threads for thread in range(threads + 1)]
        self._rest = [deque(items[cuts[thread] : cuts[thread + 1]]) for thread in range(threads)]
        self._lock = threading.Lock()

    def take(self, thread: int) -> _T | None:
        """The next item for this thread; None if all are taken."""
        with self._lock:
            own = self._rest[thread]
            if not own:
                longest = max(self._rest, key=len)
                own.extendleft(longest.pop() for _ in range((len(longest) + 1) // 2))
            return own.popleft() if own else None
