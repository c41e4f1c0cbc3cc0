"""The stored objects of a checkpoint, read piece by piece. Nothing is checked here: the reader has the checksums."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ckptd.services.catalogue import Catalogue
from ckptstore import names
from ckptstore.commit import read_outcome
from ckptstore.errors import NoCheckpoint, StoreUnavailable
from ckptstore.names import Attempt, Reference
from ckptstore.stores import Store

_SIZES_KEPT = 4096


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object of an attempt. It never changes: attempts are not rewritten."""

    key: str
    bytes: int
    version: str
    """Differs between any two objects that were ever served under one URL."""


class Objects:
    """Reads what the store holds of a checkpoint. Raises NoCheckpoint, ObjectMissing or Unavailable."""

    def __init__(self, store: Store, catalogue: Catalogue) -> None:
        self._store = store
        self._catalogue = catalogue
        self._size = lru_cache(_SIZES_KEPT)(store.size)

    def shard(self, reference: Reference, name: str) -> StoredObject:
        """A shard of a checkpoint."""
        attempt = self._attempt(reference)
        return self._object(names.shard_key(reference.run, attempt, name))

    def manifest(self, reference: Reference) -> StoredObject:
        """The manifest of a checkpoint."""
        attempt = self._attempt(reference)
        return self._object(names.manifest_key(reference.run, attempt))

    def receipt(self, reference: Reference, rank: int) -> StoredObject:
        """The receipt of a rank."""
        attempt = self._attempt(reference)
        return self._object(names.receipt_key(reference.run, attempt, rank))

    def read(self, stored: StoredObject, offset: int, count: int) -> memoryview:
        """`count` bytes from `offset`. Raises CorruptObject if the object ends before."""
        buffer = memoryview(bytearray(count))
        self._store.get_range(stored.key, offset, buffer)
        return buffer

    def _attempt(self, reference: Reference) -> Attempt:
        try:
            return self._catalogue.find(reference).attempt
        except (NoCheckpoint, StoreUnavailable):
            # A reader with a lease may finish although its checkpoint was hidden meanwhile.
            if reference.step is None or reference.ulid is None:
                raise
            attempt = Attempt(reference.step, reference.ulid)
            outcome = read_outcome(self._store, reference.run, attempt)
            if outcome is None or outcome.committed is None:
                raise
            return attempt

    def _object(self, key: str) -> StoredObject:
        size = self._size(key)
        attempt, name = key.split("/")[-2:]
        return StoredObject(key, size, f"{attempt}-{name}-{size}")
