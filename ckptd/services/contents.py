"""The shards and entries of a checkpoint, read from its manifest."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ckptapi.bodies import EntriesBody, EntryBody, Items, ShardBody
from ckptd.cache import BLOCK_BYTES, BlockCache
from ckptd.services.catalog import Catalog
from ckptstore.clock import Clock
from ckptstore.commits.catalog import Checkpoint, find_attempt
from ckptstore.commits.commit import read_outcome
from ckptstore.errors import CorruptObject, InvalidRequest, NoCheckpoint, StoreUnavailable, Unavailable
from ckptstore.format.documents import Content, Receipt
from ckptstore.format.parsing import parse_sealed
from ckptstore.format.planning import entry_bytes
from ckptstore.format.statistics import side_document
from ckptstore.names import Attempt, Reference, RunKeys, run_of, shard_name
from ckptstore.reading.assets import folder_files, open_weights
from ckptstore.reading.source import StoreSource, check_manifest_data
from ckptstore.reading.weights import VirtualFile
from ckptstore.run import Run
from ckptstore.stores import Store

MAX_MANIFEST_BYTES = 64 << 20
_KEPT = 4
_KEPT_BYTES = 4 << 20
HOLD_S = 600.0
"""A lease of a download: twice as long as a client takes from one piece or file to the next."""


@dataclass
class Contents:
    """Parses manifests one at a time, because large ones need much memory. Any thread may use it."""

    _catalog: Catalog
    _objects: Objects
    _source: StoreSource
    _clock: Clock

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._held_until: dict[tuple[str, str], float] = {}
        self._kept = lru_cache(_KEPT)(self._parse)
        self._planned = lru_cache(_KEPT)(lambda *view: folder_files(open_weights(self._source, *view)))

    def shards(self, reference: Reference) -> Items[ShardBody]:
        """The shards of a checkpoint, by rank. Raises NoCheckpoint, InvalidRequest, Damaged or Unavailable."""
        content = self._content(reference)
        pairs = np.unique(content.slices.shard * len(content.entries.name) + content.slices.entry)
        num_entries = np.bincount(pairs // max(1, len(content.entries.name)), minlength=len(content.shards))
        return Items(
            [
                ShardBody(
                    name=shard.name,
                    rank=shard.rank,
                    num_chunks=len(shard.chunks.raw),
                    num_entries=int(count),
                    raw_bytes=int(shard.chunks.raw.sum()),
                    stored_bytes=shard.stored_bytes,
                )
                for shard, count in zip(content.shards, num_entries, strict=True)
            ]
        )

    def entries(self, reference: Reference, offset: int, limit: int) -> EntriesBody:
        """A page of the entries of a checkpoint. Raises as `shards` does."""
        content = self._content(reference)
        entries, sizes = content.entries, entry_bytes(content)
        num_slices = np.bincount(content.slices.entry, minlength=len(entries.name))
        stop = min(len(entries.name), offset + limit)
        items = [
            EntryBody(
                name=entries.name[at],
                dtype=entries.dtype[at],
                shape=entries.shape[at],
                num_slices=int(num_slices[at]),
                raw_bytes=sizes[entries.name[at]],
            )
            for at in range(offset, stop)
        ]
        return EntriesBody(items, len(entries.name), stop if stop < len(entries.name) else None)

    def folder(self, checkpoint: Checkpoint, item: str, dtype: str | None) -> dict[str, VirtualFile]:
        """The files of a Hugging Face folder of a checkpoint. Raises as `shards` does."""
        with self._lock:
            return self._planned(checkpoint, item, dtype)

    def hold(self, checkpoint: Checkpoint, holder: str) -> None:
        """Keep a checkpoint from being deleted for at least HOLD_S / 2 from now. Raises NoCheckpoint or Unavailable."""
        key, now = (checkpoint.id, holder), self._clock()
        if self._held_until.get(key, now) > now:
            return
        # The earlier lease expires by itself: one that is renewed may last as long again.
        self._source.take_lease(checkpoint, holder, HOLD_S)
        held = {one: until for one, until in self._held_until.copy().items() if until > now}
        self._held_until = {**held, key: now + HOLD_S / 2}  # two threads at once may take two leases

    def _content(self, reference: Reference) -> Content:
        checkpoint = self._catalog.find(reference)
        if checkpoint.manifest_bytes > MAX_MANIFEST_BYTES:
            raise InvalidRequest(
                f"the manifest of {checkpoint.id} has {checkpoint.manifest_bytes} bytes",
                "Download it instead: GET .../manifest",
            )
        parsed = self._kept if checkpoint.manifest_bytes <= _KEPT_BYTES else self._parse
        with self._lock:
            return parsed(checkpoint, reference)

    def _parse(self, checkpoint: Checkpoint, reference: Reference) -> Content:
        stored = self._objects.find(reference, RunKeys.manifest)
        if stored.bytes != checkpoint.manifest_bytes:
            raise CorruptObject(f"the manifest of {checkpoint.id} has {stored.bytes} bytes")
        return check_manifest_data(checkpoint, self._objects.read_all(stored)).content


_SIZES_KEPT = 4096


class StoredObject(NamedTuple):
    """One object of an attempt, or a part of one. It is immutable: attempts are never rewritten."""

    key: str
    size: int
    """Bytes of the whole object."""
    offset: int
    """Where the part begins."""
    bytes: int
    version: str
    """Unique among all that was ever served under one URL."""


@dataclass
class Objects:
    """Reads the objects of checkpoints. Raises NoCheckpoint, ObjectMissing or Unavailable."""

    _store: Store
    _catalog: Catalog
    _cache: BlockCache

    def __post_init__(self) -> None:
        self._size = lru_cache(_SIZES_KEPT)(self._store.size)
        self._named: dict[Reference, Attempt] = {}

    def find(self, reference: Reference, key: Callable[..., str], *of: str | int) -> StoredObject:
        """An object of a checkpoint. key: its method of RunKeys, which is called with the attempt and `of`."""
        attempt = self._attempt(reference)
        return self._object(key(RunKeys(reference.run), attempt, *of))

    def statistics(self, reference: Reference, rank: int) -> StoredObject:
        """The statistics of a rank, which are a part of its shard if it has one. Raises CorruptObject as well."""
        attempt, keys = self._attempt(reference), RunKeys(reference.run)
        stored = self._object(keys.receipt(attempt, rank))
        receipt = parse_sealed(self.read_all(stored), Receipt, stored.key)
        side = side_document(receipt, rank)
        if side is None or side.offset is None:
            return self._object(keys.statistics(attempt, rank))
        shard = self._object(keys.shard(attempt, shard_name(rank)))
        if not side.bytes or side.offset + side.bytes > shard.size:
            raise CorruptObject(f"{shard.key} has no statistics at {side.offset}")
        return shard._replace(offset=side.offset, bytes=side.bytes, version=f"{shard.version}-{side.digest}")

    def read(self, stored: StoredObject, offset: int, count: int, fresh: bool = False) -> memoryview:
        """At least one and at most `count` bytes from `offset`: those that are in the same piece.

        fresh: bypass the cache. Raises CorruptObject if the object ends earlier.
        """
        if fresh:
            return self._cache.read_past(stored.key, stored.offset + offset, min(count, BLOCK_BYTES))
        return self._cache.read(stored.key, stored.size, stored.offset + offset, count)

    def read_all(self, stored: StoredObject) -> bytes:
        """The whole of a small object; the caller verifies it."""
        data = bytearray()
        while len(data) < stored.bytes:
            data += self.read(stored, len(data), stored.bytes - len(data))
        return bytes(data)

    def forget(self, key: str) -> None:
        """Remove an object that was written again from the cache; so are the others of its attempt."""
        attempt = key.split("/")[2]
        self._size.cache_clear()
        self._cache.drop(run_of(key), Attempt.parse(attempt))

    def forget_deleted(self) -> None:
        """Remove the pieces of deleted checkpoints from the cache. Never raises CkptError."""
        for run, attempt in self._cache.owners():
            try:
                self._catalog.find(Reference(run, attempt.step, attempt.ulid))
            except NoCheckpoint:
                self._cache.drop(run, attempt)
            except Unavailable:
                return  # deletions cannot be determined now: try in the next round

    def _attempt(self, reference: Reference) -> Attempt:
        try:
            return self._catalog.find(reference).attempt
        except (NoCheckpoint, StoreUnavailable):
            # A reader with a lease may finish although its checkpoint has been hidden since.
            if reference.step is None or reference.ulid is None:
                raise
            run = Run(self._store, reference.run)
            attempt = self._named.get(reference) or find_attempt(run, reference)
            outcome = read_outcome(run, attempt) if attempt else None
            if not attempt or not outcome or outcome.committed is None:
                raise
            if len(self._named) >= _SIZES_KEPT:
                self._named.clear()
            self._named[reference] = attempt  # an exact reference means it once and for all
            return attempt

    def _object(self, key: str) -> StoredObject:
        size = self._size(key)
        attempt, name = key.split("/")[-2:]
        return StoredObject(key, size, 0, size, f"{attempt}-{name}-{size}")
