"""One read for all replicas: one rank reads the chunks that several ranks need, and sends them to the others.

All ranks exchange their needs and compute the same division of work: each stretch of chunks that several ranks need is
read by the one of them with the fewest bytes to read so far. Stretches are exchanged in rounds of bounded size, while
the next ones are read and the last ones decoded. Ranks send stored bytes, and each rank verifies them itself.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter, itemgetter
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ckpt.ranks.world import World
from ckptstore.commits.catalog import Checkpoint
from ckptstore.format.documents import Content
from ckptstore.format.planning import READ_BYTES, ChunkRead, ShardRead, batches, coalesce
from ckptstore.format.shards import Places
from ckptstore.reading.fetch import DEFAULT_THREADS, Buffers, Progress, fetch, fetch_stored, place_chunk, received
from ckptstore.reading.source import ShardSource

ROUND_BYTES = 64 << 20
"""Maximum number of stored bytes exchanged per round, unless one stretch is larger."""
_STRETCH_BYTES = 1 << 20  # smaller reads are not worth their request
_AHEAD = 4  # stretches that a rank reads before their round

ChunkId = tuple[int, int]
"""Index of a shard, and index of a chunk in it."""
Ranks = tuple[int, ...]


class ShardStretch(NamedTuple):
    """Adjacent chunks of one shard that the same ranks need, and the rank that reads them."""

    shard: int
    chunks: tuple[int, ...]
    bytes: int
    ranks: Ranks
    reader: int


Round = Sequence[ShardStretch]


def share_bytes(world: World, data: bytes) -> bytes:
    """The bytes that rank 0 has, on every rank; the others pass none. Raises RankLost."""
    shared = np.zeros(world.decide(len(data), itemgetter(0)), np.uint8)
    if data:
        shared[:] = np.frombuffer(data, np.uint8)
    dist.broadcast(torch.from_numpy(shared), group=world.exchange_group(), group_src=0)
    return shared.tobytes()


def divide(content: Content, needs: Mapping[Ranks, Sequence[ChunkId]], world_size: int) -> list[list[ShardStretch]]:
    """The rounds of stretches that more than one rank needs. Pure; equal on every rank.

    needs: chunks, by the ranks that have the same needs.
    """
    groups = defaultdict[ChunkId, tuple[Ranks, ...]](tuple)
    for ranks, need in needs.items():
        for chunk in need:
            groups[chunk] += (ranks,)
    merged = {found: tuple(sorted(rank for ranks in found for rank in ranks)) for found in set(groups.values())}
    ranks_of = {chunk: merged[found] for chunk, found in groups.items() if len(merged[found]) > 1}
    load, stretches = [0] * world_size, list[ShardStretch]()
    for shard, chunks, ranks, stored in _neighbours(ranks_of, content):
        reader = min(ranks, key=load.__getitem__)
        load[reader] += stored
        stretches.append(ShardStretch(shard, chunks, stored, ranks, reader))
    return list(batches(stretches, attrgetter("bytes"), ROUND_BYTES))


def _neighbours(ranks_of: Mapping[ChunkId, Ranks], content: Content) -> list[tuple[int, tuple[int, ...], Ranks, int]]:
    """Runs of adjacent chunks that the same ranks need, small enough to divide evenly among them, and their bytes."""
    most = max(map(len, ranks_of.values()), default=1)
    total = sum(int(content.shards[shard].chunks.stored[chunk]) for shard, chunk in ranks_of)
    limit = min(READ_BYTES, max(_STRETCH_BYTES, min(ROUND_BYTES, total) // most))
    places = {shard: Places.of(content.shards[shard]) for shard in {shard for shard, _ in ranks_of}}
    found: list[tuple[int, tuple[int, ...], Ranks, int]] = []
    for (shard, chunk), ranks in sorted(ranks_of.items()):
        stored = int(content.shards[shard].chunks.stored[chunk])
        if found:
            last, chunks, needed_by, size = found[-1]
            follows = (last, chunks[-1] + 1, needed_by) == (shard, chunk, ranks) and places[shard].adjoins(chunk)
            if follows and size + stored <= limit:
                found[-1] = shard, (*chunks, chunk), ranks, size + stored
                continue
        found.append((shard, (chunk,), ranks, stored))
    return found


def fetch_shared(
    world: World,
    source: ShardSource,
    checkpoint: Checkpoint,
    content: Content,
    reads: Sequence[ShardRead],
    buffers: Buffers,
    progress: Progress,
) -> None:
    """Like `fetch`, but a collective of all ranks: bytes that several ranks need are read from the store once.

    The bytes pass through host memory: NCCL would keep gigabytes of each GPU for the connections of an exchange.
    A rank whose own work failed takes part until the end, and raises its error then.
    Raises RankLost if a rank is gone.
    """
    number = {shard.name: i for i, shard in enumerate(content.shards)}
    own = {(number[chunk.shard], chunk.index): chunk for read in reads for chunk in read.chunks}
    packed = world.gather_alike(np.array(sorted(key for key in own if not own[key].bases), np.int64).tobytes())
    needs = {
        ranks: [(shard, chunk) for shard, chunk in np.frombuffer(data, np.int64).reshape(-1, 2).tolist()]
        for data, ranks in packed.items()
    }
    rounds = divide(content, needs, world.size)
    shared = {(stretch.shard, chunk) for one in rounds for stretch in one for chunk in stretch.chunks}
    alone = coalesce(
        chunk
        for key, chunk in sorted(own.items(), key=lambda item: (item[0][0], item[1].attempt or "", item[1].offset))
        if key not in shared
    )
    if rounds:
        _Exchange(world, source, checkpoint, own, buffers, progress).run(rounds)
    fetch(source, checkpoint, alone, buffers, progress)


def _parts(data: memoryview, sizes: Iterable[int]) -> Iterator[memoryview]:
    """Data in parts of these sizes, one after the other."""
    at = 0
    for size in sizes:
        yield data[at : at + size]
        at += size


@dataclass
class _Exchange:
    """One rank's part in the rounds of one restore."""

    _world: World
    _source: ShardSource
    _checkpoint: Checkpoint
    _own: Mapping[ChunkId, ChunkRead]
    _buffers: Buffers
    _progress: Progress
    _error: Exception | None = None

    def run(self, rounds: Sequence[Round]) -> None:
        """Raises the first error of this rank, after the last round."""
        mine = [[stretch for stretch in one if stretch.reader == self._world.rank] for one in rounds]
        reading: deque[Future[memoryview]] = deque()
        placing: Iterable[None] = ()
        self._watch = self._world.watch_collectives()
        with (
            ThreadPoolExecutor(self._source.parallel_reads, thread_name_prefix="ckpt-fetch") as readers,
            ThreadPoolExecutor(DEFAULT_THREADS, thread_name_prefix="ckpt-decode") as decoders,
        ):
            begun = (readers.submit(self._read, stretch) for own in mine for stretch in own)
            for one, own in zip(rounds, mine, strict=True):
                reading += islice(begun, max(0, _AHEAD + len(own) - len(reading)))
                stored = {stretch: reading.popleft().result() for stretch in own}
                received = self._pass_on(one, stored)
                list(placing)  # waits for the round before
                placing = decoders.map(self._place, received)
            list(placing)
        if self._error is not None:
            raise self._error

    def _read(self, stretch: ShardStretch) -> memoryview:
        """The stored bytes; after an error zeros, which will not match any rank's checksum."""
        if self._error is None:
            try:
                return fetch_stored(self._source, self._checkpoint, ShardRead(tuple(self._chunks(stretch))))
            except Exception as error:  # of any type: the other ranks wait for the bytes
                self._error = error
        return memoryview(bytearray(stretch.bytes))

    def _place(self, arrived: tuple[ShardStretch, memoryview]) -> None:
        stretch, stored = arrived
        chunks = self._chunks(stretch)
        for chunk, part in zip(chunks, _parts(stored, [chunk.stored for chunk in chunks]), strict=True):
            if self._error is not None:
                return
            try:
                with received(ShardRead((chunk,)), self._buffers) as (read, buffers):
                    place_chunk(self._checkpoint, read.chunks[0], part, buffers)
                self._progress(chunk.raw)
            except Exception as error:
                self._error = error

    def _chunks(self, stretch: ShardStretch) -> list[ChunkRead]:
        return [self._own[stretch.shard, chunk] for chunk in stretch.chunks]

    def _pass_on(self, one: Round, stored: Mapping[ShardStretch, memoryview]) -> list[tuple[ShardStretch, memoryview]]:
        """Send the bytes this rank read to the ranks that need them, and receive its own, in small steps."""
        rank, ranks = self._world.rank, range(self._world.size)
        outgoing = [tuple(s for s in one if s.reader == rank != to and to in s.ranks) for to in ranks]
        incoming = [tuple(s for s in one if s.reader == by != rank and rank in s.ranks) for by in ranks]
        # Replicas receive equal bytes: they share one copy.
        streams = {to: memoryview(b"".join(stored[s] for s in to)) for to in outgoing}
        missing = [sum(s.bytes for s in of) for of in incoming]
        received = [bytearray() for _ in ranks]
        longest = max(sum(s.bytes for s in one if s.reader == reader) for reader in {s.reader for s in one})
        step = max(_STRETCH_BYTES // 16, ROUND_BYTES // len(ranks))
        for at in range(0, longest, step):
            sizes = [min(step, max(0, size - at)) for size in missing]
            parts = [streams[to][at : at + step] for to in outgoing]
            sending = torch.from_numpy(np.frombuffer(bytearray().join(parts), np.uint8))
            into = torch.empty(sum(sizes), dtype=torch.uint8)
            with self._watch():
                dist.all_to_all_single(into, sending, sizes, list(map(len, parts)), group=self._world.exchange_group())
            for data, part in zip(received, _parts(into.numpy().data, sizes), strict=True):
                data += part
        found = list(stored.items())
        for of, data in zip(incoming, received, strict=True):
            found += zip(of, _parts(memoryview(data), [s.bytes for s in of]), strict=True)
        return found
