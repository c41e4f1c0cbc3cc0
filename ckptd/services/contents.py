"""The shards and entries of a checkpoint, read from its manifest."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np

from ckptapi.bodies import EntriesBody, EntryBody, ShardBody, ShardsBody
from ckptd.services.catalog import Catalog
from ckptd.services.objects import Objects
from ckptstore.errors import CorruptObject, InvalidRequest
from ckptstore.format.documents import Content, Manifest
from ckptstore.format.planning import entry_bytes
from ckptstore.names import Reference
from ckptstore.reading.source import check_manifest_data

MAX_MANIFEST_BYTES = 64 << 20
_KEPT = 4
_KEPT_BYTES = 4 << 20


class Contents:
    """Parses manifests one at a time, because large ones need much memory. Any thread may use it."""

    def __init__(self, catalog: Catalog, objects: Objects) -> None:
        self._catalog = catalog
        self._objects = objects
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Manifest] = OrderedDict()

    def shards(self, reference: Reference) -> ShardsBody:
        """The shards of a checkpoint, by rank. Raises NoCheckpoint, InvalidRequest, Damaged or Unavailable."""
        content = self._content(reference)
        pairs = np.unique(content.slices.shard * len(content.entries.name) + content.slices.entry)
        num_entries = np.bincount(pairs // max(1, len(content.entries.name)), minlength=len(content.shards))
        return ShardsBody(
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
            for at in range(min(offset, stop), stop)
        ]
        return EntriesBody(items, len(entries.name), stop if stop < len(entries.name) else None)

    def _content(self, reference: Reference) -> Content:
        return self._manifest(reference).content

    def _manifest(self, reference: Reference) -> Manifest:
        checkpoint = self._catalog.find(reference)
        if checkpoint.manifest_bytes > MAX_MANIFEST_BYTES:
            raise InvalidRequest(
                f"the manifest of {checkpoint.id} has {checkpoint.manifest_bytes} bytes",
                "Download it instead: GET .../manifest",
            )
        with self._lock:
            manifest = self._kept.get(checkpoint.manifest_digest)
            if manifest is None:
                stored = self._objects.manifest(reference)
                if stored.bytes != checkpoint.manifest_bytes:
                    raise CorruptObject(f"the manifest of {checkpoint.id} has {stored.bytes} bytes")
                manifest = check_manifest_data(checkpoint, self._objects.read_all(stored))
                if checkpoint.manifest_bytes <= _KEPT_BYTES:
                    self._kept[checkpoint.manifest_digest] = manifest
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return manifest
