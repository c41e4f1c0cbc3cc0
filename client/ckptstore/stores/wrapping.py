"""Base class for stores that change a few methods of another store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckptstore.codecs.chunk_codecs import Buffer
from ckptstore.stores.base import ObjectInfo, ObjectReader, ObjectWriter, Store


class WrappedStore(Store):
    """Forwards every method to another store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.url = store.url
        self.identity = store.identity
        self.parallel_reads = store.parallel_reads
        self.longest_read = store.longest_read
        self.retry_s = store.retry_s
        self.resumes_uploads = store.resumes_uploads
        self.shared_between_processes = store.shared_between_processes
        self.creates_by_itself = store.creates_by_itself
        self.remote_create = store.remote_create

    @property
    def on_this_host(self) -> bool:
        return self._store.on_this_host

    def reconnect(self) -> None:
        self._store.reconnect()

    def put(self, key: str, data: Buffer) -> None:
        self._store.put(key, data)

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        return self._store.put_if_absent(key, data)

    def open_writer(self, key: str, size_hint: int = 0) -> ObjectWriter:
        return self._store.open_writer(key, size_hint)

    def open_replacement(self, key: str, size_hint: int = 0) -> ObjectWriter:
        return self._store.open_replacement(key, size_hint)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> int:
        return self._store.read_into(key, offset, buffer)

    def size(self, key: str) -> int:
        return self._store.size(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self._store.list(prefix)

    def list_folders(self, prefix: str) -> Iterator[str]:
        return self._store.list_folders(prefix)

    def delete_many(self, keys: Iterable[str]) -> None:
        self._store.delete_many(keys)

    def abort_uploads(self, prefix: str, begun_before: float) -> int:
        return self._store.abort_uploads(prefix, begun_before)

    def open_reader(self, key: str) -> ObjectReader:
        return self._store.open_reader(key)
