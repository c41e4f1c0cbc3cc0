"""The stored objects of a checkpoint, read in pieces through the cache. The reader verifies the checksums."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from ckptd.cache import BLOCK_BYTES, BlockCache
from ckptd.services.catalog import Catalog
from ckptstore.commits.catalog import find_attempt
from ckptstore.commits.commit import read_outcome
from ckptstore.errors import CorruptObject, NoCheckpoint, StoreUnavailable, Unavailable
from ckptstore.format.documents import Receipt
from ckptstore.format.parsing import parse_sealed
from ckptstore.format.statistics import side_document
from ckptstore.names import Attempt, Reference, RunKeys, shard_name
from ckptstore.run import Run
from ckptstore.stores import Store

_SIZES_KEPT = 4096


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object of an attempt, or a part of one. It is immutable: attempts are never rewritten."""

    key: str
    size: int
    """Bytes of the whole object."""
    offset: int
    """Where the part begins."""
    bytes: int
    version: str
    """Unique among all that was ever served under one URL."""


class Objects:
    """Reads the objects of checkpoints. Raises NoCheckpoint, ObjectMissing or Unavailable."""

    def __init__(self, store: Store, catalog: Catalog, cache: BlockCache) -> None:
        self._store = store
        self._catalog = catalog
        self._cache = cache
        self._size = lru_cache(_SIZES_KEPT)(store.size)
        self._named: dict[Reference, Attempt] = {}

    def shard(self, reference: Reference, name: str) -> StoredObject:
        """A shard of a checkpoint."""
        attempt = self._attempt(reference)
        return self._object(RunKeys(reference.run).shard(attempt, name))

    def manifest(self, reference: Reference) -> StoredObject:
        """The manifest of a checkpoint."""
        attempt = self._attempt(reference)
        return self._object(RunKeys(reference.run).manifest(attempt))

    def receipt(self, reference: Reference, rank: int) -> StoredObject:
        """The receipt of a rank."""
        attempt = self._attempt(reference)
        return self._object(RunKeys(reference.run).receipt(attempt, rank))

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
        return replace(shard, offset=side.offset, bytes=side.bytes, version=f"{shard.version}-{side.digest}")

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
        run, _, attempt, _ = key.split("/")
        self._size.cache_clear()
        self._cache.drop(run, Attempt.parse(attempt))

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
            attempt = self._decided(reference)
            outcome = read_outcome(Run(self._store, reference.run), attempt) if attempt is not None else None
            if attempt is None or outcome is None or outcome.committed is None:
                raise
            return attempt

    def _decided(self, reference: Reference) -> Attempt | None:
        """The attempt that an exact reference names, from a listing of the store, which names it once and for all."""
        attempt = self._named.get(reference)
        if attempt is None:
            attempt = find_attempt(Run(self._store, reference.run), reference)
            if attempt is not None:
                if len(self._named) >= _SIZES_KEPT:
                    self._named.clear()
                self._named[reference] = attempt
        return attempt

    def _object(self, key: str) -> StoredObject:
        size = self._size(key)
        attempt, name = key.split("/")[-2:]
        return StoredObject(key, size, 0, size, f"{attempt}-{name}-{size}")
