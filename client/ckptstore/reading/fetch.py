"""Reading: fetch planned reads, verify, decode and place the chunks.

Every chunk is checked against its checksum before it is used. Uncompressed chunks on local disks are read directly into
their destination and checked there; all others are checked before any byte reaches the destination. Adjacent chunks
are read together, regardless of the tensors they belong to: the cost is in the interpreter, not in the bytes.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from ckptstore import human
from ckptstore.codecs.chunk_codecs import RAW, decode
from ckptstore.codecs.dtypes import cast_into
from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import CkptError, CorruptObject, Damaged, ObjectMissing, Unavailable
from ckptstore.format.documents import digest
from ckptstore.format.planning import READ_BYTES, ChunkRead, Piece, ShardRead, chunks_of, coalesce, join
from ckptstore.reading.source import ShardSource
from ckptstore.stores import CACHED_BYTES, PARALLEL_READS, ObjectReader

logger = logging.getLogger(__name__)

Progress = Callable[[int], None]
"""Called with the number of raw bytes just completed; from any thread."""
HostBuffers = Mapping[str, memoryview]
"""Writable bytes by buffer name, as in `Piece.buffer`."""


class Receiver(ABC):
    """Buffers that are partly not in host memory, so that their bytes pass through staging memory."""

    @abstractmethod
    def divide(self, read: ShardRead) -> Iterable[ShardRead]:
        """Split a read into parts that each fit into staging memory."""

    @abstractmethod
    def receive(self, read: ShardRead) -> AbstractContextManager[tuple[ShardRead, HostBuffers]]:
        """Such a part, with staging memory in place of device buffers. The context manager sends the staged bytes to
        the device on exit, unless the block raised."""


Buffers = HostBuffers | Receiver


DEFAULT_THREADS = PARALLEL_READS
_ELEMENTS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


class Scratch:
    """Reusable memory for one chunk or range at a time. For one thread."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def take(self, num_bytes: int) -> memoryview:
        """Writable memory of this size; invalidates what was returned before."""
        if len(self._memory) < num_bytes:
            self._memory = np.empty(num_bytes, np.uint8).data
        return self._memory[:num_bytes]


def fetch(
    source: ShardSource,
    checkpoint: Checkpoint,
    reads: Sequence[ShardRead],
    buffers: Buffers,
    progress: Progress = lambda _: None,
    threads: int | None = None,
    again: bool = True,
) -> None:
    """Fetch, verify and decode the chunks, and place their pieces. threads: None for what suits the source. again: see
    `ObjectReader.expect`.

    Returns when all bytes are checked and placed. The first error stops the fetch; the contents of the buffers are then
    undefined and may be damaged.
    """
    _Fetching(source, checkpoint, buffers, progress, again).run(reads, threads)


def fetch_readable(
    source: ShardSource, checkpoint: Checkpoint, reads: Sequence[ShardRead], buffers: Buffers, progress: Progress,
    again: bool = True,
) -> tuple[list[ShardRead], CkptError | None]:  # fmt: skip
    """Like `fetch`, but returns the reads of chunks that cannot be read there, and the first error, if there is one.

    These are damaged or missing, chunk by chunk; once the source is unavailable, all that are left. Their buffers may
    hold anything. Other errors are raised.
    """
    fetching = _FetchingReadable(source, checkpoint, buffers, lambda _: None, again, progress)
    fetching.run(reads, None)
    chunks = sorted(fetching.left, key=lambda chunk: (chunk.shard, chunk.attempt or "", chunk.offset))
    return coalesce(chunks), fetching.error


@dataclass
class _Fetching:
    """One fetch, in several threads."""

    _source: ShardSource
    _checkpoint: Checkpoint
    _buffers: Buffers
    _progress: Progress
    _again: bool

    def __post_init__(self) -> None:
        self._stop = threading.Event()

    def run(self, reads: Sequence[ShardRead], threads: int | None) -> None:
        threads = threads or self._source.parallel_reads
        if isinstance(self._buffers, Receiver):
            reads = [part for read in reads for part in self._buffers.divide(read)]
        elif self._source.longest_read:
            # At least about two per thread, so that a thread that finishes early can take over from others.
            share = min(self._source.longest_read, sum(read.bytes for read in reads) // (2 * threads))
            reads = join(reads, share + READ_BYTES // 2)
        threads = max(1, min(threads, len(reads)))
        stretches = Stretches(reads, threads)
        with ThreadPoolExecutor(threads, thread_name_prefix="ckpt-fetch") as pool:
            others = [pool.submit(self._work, stretches, thread) for thread in range(1, threads)]
            self._work(stretches, 0)
            for other in others:
                other.result()

    def _work(self, stretches: Stretches[ShardRead], thread: int) -> None:
        try:
            with closing(_Fetch(self._source, self._checkpoint, self._progress, self._again)) as one:
                while not self._stop.is_set() and (read := stretches.take(thread)) is not None:
                    self._fetch(one, read)
        except BaseException:  # also KeyboardInterrupt: the pool waits for running work
            self._stop.set()
            raise

    def _fetch(self, one: _Fetch, read: ShardRead) -> None:
        with received(read, self._buffers) as (part, one.buffers), _naming(part.chunks[-1]):
            one.fetch(part)


@dataclass
class _FetchingReadable(_Fetching):
    """A fetch that leaves out what cannot be read."""

    _read: Progress
    """Called for whole reads: the chunks of one that fails are read again, one by one."""
    _away: bool = False
    left: list[ChunkRead] = field(default_factory=list)
    error: CkptError | None = None

    def _fetch(self, one: _Fetch, read: ShardRead) -> None:
        if self._away:
            self.left += read.chunks
            return
        try:
            super()._fetch(one, read)
        except (Damaged, ObjectMissing, Unavailable) as error:
            one.close()
            self.error = self.error or error
            self._away |= isinstance(error, Unavailable)
            if len(read.chunks) == 1:
                self.left += read.chunks
            else:
                for chunk in read.chunks:
                    self._fetch(one, ShardRead((chunk,)))
        else:
            self._read(raw_bytes((read,)))


def received(read: ShardRead, buffers: Buffers) -> AbstractContextManager[tuple[ShardRead, HostBuffers]]:
    """The reads, and host buffers to read into. On exit the bytes are in `buffers`, or being copied there."""
    return buffers.receive(read) if isinstance(buffers, Receiver) else nullcontext((read, buffers))


@dataclass
class _Fetch:
    """The open shard and the scratch memory of one thread."""

    _source: ShardSource
    _checkpoint: Checkpoint
    _progress: Progress
    _again: bool
    _shard: ObjectReader | None = None
    _opened: tuple[str, str | None] | None = None

    def __post_init__(self) -> None:
        self.buffers: HostBuffers = {}
        self._stored, self._raw = Scratch(), Scratch()

    def fetch(self, read: ShardRead) -> None:
        """Fetch all chunks of a read and place them."""
        shard = self._open(read)
        shard.expect(read.offset, read.bytes, self._again)
        if not shard.small_reads:
            stored = self._stored.take(read.bytes)
            shard.read(read.offset, stored)
            for chunk in read.chunks:
                part = stored[chunk.offset - read.offset :][: chunk.stored]
                place_chunk(self._checkpoint, chunk, part, self.buffers, self._raw, self._source)
                self._progress(chunk.raw)
            return
        for chunks in _adjacent(read.chunks):
            first = chunks[0]
            target = _contiguous_target(first, self.buffers) if first.codec == RAW else None
            if target is not None and first.stored > CACHED_BYTES:
                if shard.read_hashed(first.offset, target) != first.digest:
                    raise _checksum_error(self._checkpoint, first)
            else:
                self._read_adjacent(shard, chunks)
            self._progress(sum(chunk.raw for chunk in chunks))

    def _open(self, read: ShardRead) -> ObjectReader:
        if self._shard is None or self._opened != (read.shard, read.attempt):
            self.close()
            self._shard = self._source.open_shard(self._checkpoint.holder(read.attempt), read.shard)
            self._opened = read.shard, read.attempt
        return self._shard

    def close(self) -> None:
        """Close the shard; another read opens it again."""
        shard, self._shard = self._shard, None
        if shard is not None:
            shard.close()

    def _read_adjacent(self, shard: ObjectReader, chunks: Sequence[ChunkRead]) -> None:
        """Read adjacent chunks, raw ones into their destination, and check them while they are in the CPU cache."""
        rest = self._stored.take(sum(chunk.stored for chunk in chunks))
        parts, placed = [], []
        for chunk in chunks:
            part = _contiguous_target(chunk, self.buffers) if chunk.codec == RAW else None
            placed.append(part is not None)
            if part is None:
                part, rest = rest[: chunk.stored], rest[chunk.stored :]
            parts.append(part)
        shard.read_parts(chunks[0].offset, parts)
        for chunk, part, is_placed in zip(chunks, parts, placed, strict=True):
            if is_placed:
                check_chunk(self._checkpoint, chunk, part)
            else:
                place_chunk(self._checkpoint, chunk, part, self.buffers, self._raw, self._source)


def _adjacent(chunks: Iterable[ChunkRead]) -> Iterator[list[ChunkRead]]:
    """Groups of chunks without gaps between them, each read at once."""
    run: list[ChunkRead] = []
    end = size = 0
    for chunk in chunks:
        if run and (chunk.offset != end or size + chunk.stored > CACHED_BYTES):
            yield run
            run, size = [], 0
        run.append(chunk)
        size += chunk.stored
        end = chunk.offset + chunk.stored
    yield run


def fetch_stored(source: ShardSource, checkpoint: Checkpoint, read: ShardRead, *, again: bool = True) -> memoryview:
    """The stored bytes of a range, unchecked. Raises CorruptObject, ObjectMissing or Unavailable.

    again: whether another read of them is likely, so that a cache is worth its cost; else they are read-only.
    """
    with (
        _naming(read.chunks[-1]),
        source.open_shard(checkpoint.holder(read.attempt), read.shard) as shard,
    ):
        if not again:
            return shard.read_once(read.offset, read.bytes)
        stored = np.empty(read.bytes, np.uint8).data
        shard.read(read.offset, stored)
        return stored


@contextmanager
def _naming(last: ChunkRead) -> Iterator[None]:
    """Make an error name a chunk. last: of the range that is read, which a missing or truncated shard lacks."""
    try:
        yield
    except (Damaged, ObjectMissing) as error:
        error.chunks = error.chunks or ((last.shard, last.index),)
        raise


def check_chunk(checkpoint: Checkpoint, chunk: ChunkRead, stored: memoryview) -> None:
    """Raises CorruptObject unless the stored bytes match the checksum."""
    if digest(stored) != chunk.digest:
        raise _checksum_error(checkpoint, chunk)


def decoded(source: ShardSource, checkpoint: Checkpoint, parts: Sequence[ChunkRead]) -> memoryview:
    """A chunk before encoding, checked. parts: as in ChunkRead. Raises CorruptObject, ObjectMissing or Unavailable."""
    raw = np.empty(parts[-1].raw, np.uint8).data
    _decode_parts(source, checkpoint, parts, raw)
    return raw


def _decode_parts(source: ShardSource, checkpoint: Checkpoint, parts: Iterable[ChunkRead], into: memoryview) -> None:
    for part in parts:
        stored = fetch_stored(source, checkpoint, ShardRead((part,)))
        check_chunk(checkpoint, part, stored)
        _decode(checkpoint, part, stored, into)


def place_chunk(
    checkpoint: Checkpoint, chunk: ChunkRead, stored: memoryview, buffers: HostBuffers, scratch: Scratch | None = None,
    source: ShardSource | None = None,
) -> None:  # fmt: skip
    """Check and decode one chunk, and place its pieces. Raises CorruptObject before it places anything.

    source: has its bases; only a delta needs it, which raises ObjectMissing or Unavailable as well.
    """
    check_chunk(checkpoint, chunk, stored)
    target, raw = _contiguous_target(chunk, buffers), stored
    if target is not None or chunk.codec != RAW:
        raw = target if target is not None else (scratch or Scratch()).take(chunk.raw)
        if source is not None:
            _decode_parts(source, checkpoint, chunk.bases, raw)
        _decode(checkpoint, chunk, stored, raw)
    if target is not None:
        return
    for piece in chunk.pieces:
        _place(piece, raw, buffers[piece.buffer])


def _contiguous_target(chunk: ChunkRead, buffers: HostBuffers) -> memoryview | None:
    """The destination of the decoded chunk if it is contiguous in one buffer, else None."""
    first = chunk.pieces[0]
    if len(chunk.pieces) == 1 and first.is_flat and first.shape[0] * first.item == chunk.raw:
        return buffers[first.buffer][first.to : first.to + chunk.raw]
    return None


def _checksum_error(checkpoint: Checkpoint, chunk: ChunkRead) -> CorruptObject:
    error = CorruptObject(f"{chunk.name} of {checkpoint.id} does not match its checksum")
    error.chunks = ((chunk.shard, chunk.index),)
    return error


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
    """Ordered items for several threads. Each thread has a contiguous part, because sequential reads are fastest.

    A thread that finishes its part takes over the back half of the longest remaining part.
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


class ChunkSource(Protocol):
    """Something that may hold chunks of one checkpoint."""

    name: str
    """For logs: memory, local."""

    def fetch(self, reads: Sequence[ShardRead], buffers: Buffers, progress: Progress) -> list[ShardRead]:
        """Verify and place the chunks that it has; returns the reads of the others, which include damaged ones.

        Never raises for what it lacks. The buffers of returned chunks may hold anything. progress: called with the raw
        bytes just placed; from any thread.
        """


def fetch_from(
    sources: Sequence[ChunkSource], reads: Sequence[ShardRead], buffers: Buffers, progress: Progress
) -> tuple[list[ShardRead], dict[str, int]]:
    """Fetch from each source what it has; returns the reads that are left, and the raw bytes by name of the source.

    All verify a chunk by the same digest, which is in the manifest. So a nearer source makes a restore faster, and can
    neither change its result nor make it fail: what it lacks, or holds damaged, is read from the next one.
    """
    left, found = list(reads), Counter[str]()
    for source in sources:
        before = raw_bytes(left)
        left = source.fetch(left, buffers, progress)
        found[source.name] += before - raw_bytes(left)
    return left, dict(found)


@dataclass
class StoredChunks:
    """The chunks of a checkpoint in another store that has the same objects."""

    name: str
    source: ShardSource
    checkpoint: Checkpoint
    whole: bool = True
    """Whether it should have all shards."""
    again: bool = True
    """See `ObjectReader.expect`."""

    def fetch(self, reads: Sequence[ShardRead], buffers: Buffers, progress: Progress) -> list[ShardRead]:
        """Fetch what can be read. One warning if anything cannot."""
        left, error = fetch_readable(self.source, self.checkpoint, reads, buffers, progress, self.again)
        if error is not None:
            usual = isinstance(error, ObjectMissing) and not self.whole
            logger.log(
                logging.DEBUG if usual else logging.WARNING,
                "%s of %s are read from elsewhere, since the %s source does not have them: %s",
                human.size(raw_bytes(left)), self.checkpoint.id, self.name, error,
            )  # fmt: skip
        return left


def raw_bytes(reads: Sequence[ShardRead]) -> int:
    """Decoded bytes of all chunks of these reads."""
    return sum(chunk.raw for chunk in chunks_of(reads))
