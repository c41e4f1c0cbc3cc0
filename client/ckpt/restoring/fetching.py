"""Fetch: the bytes of one checkpoint to this rank, from the store, from other ranks or from the daemon's cache."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
from msgspec.structs import replace

from ckpt.config import Config
from ckpt.host.segment import Segment
from ckpt.ranks.world import World, is_grouped
from ckpt.restoring.resolve import take_lease
from ckpt.saver.messages import Channel
from ckpt.saver.retained_snapshot import Attach, HeldSnapshot, ask
from ckptstore import human
from ckptstore.codecs.chunk_codecs import RAW
from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.errors import CorruptObject, DaemonUnavailable
from ckptstore.format.documents import DIGEST_BYTES, Content, Manifest
from ckptstore.format.planning import ChunkRead, ShardRead, chunks_of, coalesce
from ckptstore.names import RunKeys
from ckptstore.reading.fetch import (
    Buffers,
    ChunkSource,
    Progress,
    StoredChunks,
    fetch,
    fetch_from,
    fetch_readable,
    raw_bytes,
)
from ckptstore.reading.source import Source, StoreSource, check_manifest_data, read_manifest
from ckptstore.stores import PARALLEL_READS, ObjectReader
from ckptstore.tiers.source import LOCAL, TieredSource

logger = logging.getLogger(__name__)


@dataclass
class Fetcher:
    """Reads one checkpoint. All ranks call the same methods in the same order."""

    _source: Source
    _config: Config
    _world: World
    checkpoint: Checkpoint
    _local: bool
    """All ranks are on the host of the store."""
    lease: str | None = None
    """The lease that this rank holds; the caller releases it."""
    _past_caches = False
    _manifest = b""

    def __post_init__(self) -> None:
        source = self._source
        self._share = how_to_share(self._config, self._world.size, is_grouped(), self._local)
        self._together = _several(self._world.size)
        self._nearer: list[ChunkSource] = []
        """Asked first, in this order, by each rank for itself."""
        self._last = source
        """Has all chunks."""
        if isinstance(source, TieredSource):
            self._last = source.remote_or_local(self.checkpoint)
            if self._config.replicas is not None:
                self._nearer += host_chunks(source, self.checkpoint)
            elif self._last is not source.local:
                self._nearer.append(StoredChunks(LOCAL, source.local, self.checkpoint, again=self._together))
            if self._last is source.local and self._share == "daemon":
                self._share = "none"  # the daemon serves the remote store
        self.read: Counter[str] = Counter()
        """Raw bytes that this rank placed, by the name of the source; `store` is the last one."""

    @property
    def exchanges(self) -> bool:
        """Whether ranks exchange what they read, so that `manifest` is a collective."""
        return self._share == "broadcast"

    @contextmanager
    def protecting(self) -> Iterator[Callable[[], None]]:
        """Take the lease (rank 0) in a thread during the block.

        Yields a function that waits for the lease; call it before the first byte is placed. It raises NoCheckpoint if
        the checkpoint is being deleted, and CorruptObject if it is listed as corrupt. After the block `lease` is known,
        even if it fails, so that the caller can release it.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="ckpt-lease") as pool:
            yield pool.submit(self._protect).result

    def _protect(self) -> None:
        if self.checkpoint.state is State.CORRUPT:
            raise CorruptObject(self.checkpoint.problem)
        if self._world.rank == 0:
            self.lease = take_lease(self._source, self.checkpoint)

    def read_ahead(self) -> None:
        """Read the manifest that `manifest` will share (rank 0). Raises ObjectMissing or Unavailable."""
        if self._world.rank == 0:
            self._manifest = self._source.manifest_data(self.checkpoint)

    def manifest(self) -> Manifest:
        """The checked manifest; call `read_ahead` first if ranks exchange what they read.

        Raises Damaged, ObjectMissing, Unavailable or RankLost.
        """
        if not self.exchanges:
            return read_manifest(self._source, self.checkpoint)
        from ckpt.restoring.sharing import share_bytes  # loads torch

        return check_manifest_data(self.checkpoint, share_bytes(self._world, self._manifest))

    def read_past_caches(self) -> bool:
        """From now on read from the store itself; False if that is what was done already. The same on all ranks."""
        if self._past_caches or not (self._share == "daemon" or self._config.read_only):
            return False
        from ckptapi.client import DaemonClient

        self._past_caches = True
        if isinstance(self._source, DaemonClient):
            self._source.read_past_caches()
        return True

    def fetch(
        self, content: Content, reads: Sequence[ShardRead], buffers: Buffers, progress: Callable[[int], None]
    ) -> None:
        """Fill the buffers. Raises Damaged, ObjectMissing, Unavailable or RankLost; buffers then hold a mixture."""
        sources = list(self._nearer)
        if self._config.store is not None and (memory := attach(self._config.store, self.checkpoint)) is not None:
            sources.insert(0, memory)
        reads, found = fetch_from(sources, reads, buffers, progress)
        self.read.update(found)
        self.read["store"] += raw_bytes(reads)
        if self._share == "broadcast":
            from ckpt.restoring.sharing import fetch_shared  # loads torch

            fetch_shared(self._world, self._last, self.checkpoint, content, reads, buffers, progress)
            return
        if self._share == "daemon":
            from ckptapi.client import DaemonClient

            assert self._config.daemon is not None
            try:
                with closing(DaemonClient(self._config.daemon, self._config.token)) as daemon:
                    if self._past_caches:
                        daemon.read_past_caches()
                    fetch(daemon, self.checkpoint, reads, buffers, progress)
                    return
            except DaemonUnavailable as error:
                if self._config.read_only:
                    raise
                logger.warning("reading straight from the store: %s", error)
        fetch(self._last, self.checkpoint, reads, buffers, progress, again=self._together)


def host_chunks(source: TieredSource, checkpoint: Checkpoint) -> list[ChunkSource]:
    """The chunks of a local tier that each host has for itself: on this host, then each copy on others."""
    from ckptapi.hosts import PEER, HostsStore, PeerShards  # loads an HTTP client

    store = source.local.store
    assert isinstance(store, HostsStore)
    group = store.group(RunKeys(checkpoint.run).folder)
    copies = group.members.replicas + 1 if group.members.hosts else 0
    peers = [StoredChunks(PEER, PeerShards(store, number), checkpoint, False) for number in range(copies)]
    return [StoredChunks(LOCAL, StoreSource(store.own), checkpoint, False), *peers]


def is_local(source: Source) -> bool:
    """Whether this host alone has the store, whose page cache gives replicas the same bytes without an exchange."""
    return isinstance(source, StoreSource) and not isinstance(source, TieredSource) and source.store.on_this_host


def how_to_share(config: Config, world_size: int, grouped: bool, local: bool) -> Literal["broadcast", "daemon", "none"]:
    """The meaning of replica_reads="auto" here; a single rank shares with no other. grouped: in a group of torch, which
    can broadcast. local: all ranks are on the host of the store."""
    reads = config.replica_reads
    if local and reads == "auto":
        return "none"
    if grouped and world_size > 1 and reads in ("auto", "broadcast"):
        return "broadcast"
    wanted = reads == "daemon" or (reads == "auto" and _several(world_size))
    return "daemon" if config.daemon is not None and wanted else "none"


def _several(world_size: int) -> bool:
    """Whether other processes of the job may want the same bytes."""
    return world_size > 1 or int(os.environ.get("WORLD_SIZE", "1")) > 1


@dataclass
class SaverMemory:
    """Snapshots of one checkpoint in the memory of this host. It stays mapped as long as this object exists.

    Its bytes are those before encoding. A chunk is used if the saver's answer names the digest that is in the manifest,
    and if its bytes still have the digest that the saver took before it encoded them.
    """

    name = "memory"
    parallel_reads = PARALLEL_READS
    longest_read = 0

    _checkpoint: Checkpoint
    _shards: Mapping[str, tuple[HeldSnapshot, memoryview]]
    """The snapshot of each rank, and its memory, mapped into this process."""

    def fetch(self, reads: Sequence[ShardRead], buffers: Buffers, progress: Progress) -> list[ShardRead]:
        """Verify and place the chunks that are in memory; returns the reads of the others, and of damaged ones."""
        chunks = chunks_of(reads)
        found = {(twin.shard, twin.index): twin for chunk in chunks if (twin := self._find(chunk)) is not None}
        ordered = sorted(found.values(), key=lambda twin: (twin.shard, twin.offset))
        left, error = fetch_readable(self, self._checkpoint, coalesce(ordered), buffers, progress)
        if error is not None:
            logger.warning(
                "%s in memory are damaged, and read from elsewhere: %s", human.count(len(left), "part"), error
            )
        placed = found.keys() - {(chunk.shard, chunk.index) for chunk in chunks_of(left)}
        return coalesce(chunk for chunk in chunks if (chunk.shard, chunk.index) not in placed)

    def open_shard(self, checkpoint: Checkpoint, shard: str) -> ObjectReader:
        """A reader of the bytes before encoding."""
        return _MemoryReader(self._shards[shard][1])

    def _find(self, chunk: ChunkRead) -> ChunkRead | None:
        """The chunk as it is in memory; None if it is not the same one."""
        if chunk.shard not in self._shards:
            return None
        held = self._shards[chunk.shard][0]
        index = held.shards[chunk.shard] + chunk.index
        part = slice(DIGEST_BYTES * index, DIGEST_BYTES * (index + 1))
        if index >= len(held.at) or held.raw[index] != chunk.raw or held.digests[part].hex() != chunk.digest:
            return None
        raw, digest = held.raw[index], held.raw_digests[part].hex()
        return replace(chunk, attempt=None, offset=held.at[index], stored=raw, codec=RAW, digest=digest, bases=())


@dataclass
class _MemoryReader(ObjectReader):
    """Reads shared memory."""

    small_reads = True

    _view: memoryview

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
    shards: dict[str, tuple[HeldSnapshot, memoryview]] = {}
    for answer, channel in ask(store, checkpoint.run, question):
        if not isinstance(answer, HeldSnapshot):
            logger.debug("no memory: %s", answer)
            continue
        try:
            shards |= dict.fromkeys(answer.shards, (answer, _mapped(answer, channel)))
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
