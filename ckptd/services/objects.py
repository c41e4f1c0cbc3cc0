"""The stored objects of a checkpoint, read piece by piece. Nothing is checked here: the reader has the checksums."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ckptd.services.catalogue import Catalogue
from ckptstore import names
from ckptstore.names import Reference
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
        checkpoint = self._catalogue.find(reference)
        return self._object(names.shard_key(checkpoint.run, checkpoint.attempt, name))

    def manifest(self, reference: Reference) -> StoredObject:
        """The manifest of a checkpoint."""
        checkpoint = self._catalogue.find(reference)
        return self._object(names.manifest_key(checkpoint.run, checkpoint.attempt))

    def receipt(self, reference: Reference, rank: int) -> StoredObject:
        """The receipt of a rank."""
        checkpoint = self._catalogue.find(reference)
        return self._object(names.receipt_key(checkpoint.run, checkpoint.attempt, rank))

    def read(self, stored: StoredObject, offset: int, count: int) -> memoryview:
        """`count` bytes from `offset`. Raises CorruptObject if the object ends before."""
        buffer = memoryview(bytearray(count))
        self._store.get_range(stored.key, offset, buffer)
        return buffer

    def _object(self, key: str) -> StoredObject:
        size = self._size(key)
        attempt, name = key.split("/")[-2:]
        return StoredObject(key, size, f"{attempt}-{name}-{size}")
