"""Reads of immutable objects through a folder on disk; concurrent readers of the same bytes share one fetch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from ckptd.cache.extents import Extent, Extents
from ckptd.cache.folder import Folder
from ckptd.metrics import Metrics
from ckptstore.names import Attempt, RunKeys
from ckptstore.stores import Store

_LOG = logging.getLogger(__name__)


@dataclass
class BlockCache:
    """An LRU cache of store reads in a folder. Any thread may use it."""

    _store: Store
    _folder: Folder | None
    """None for no cache; concurrent readers still share one read."""
    _limit_bytes: int
    _parallel_reads: int
    """Maximum number of concurrent store reads; each holds one block in memory."""
    _metrics: Metrics

    def __post_init__(self) -> None:
        self._may_read = threading.BoundedSemaphore(self._parallel_reads)
        self._lock = threading.Lock()
        self._extents = Extents(self._limit_bytes if self._folder else 0)
        self._flights: dict[Extent, Future[memoryview]] = {}
        self._complained = False
        self._metrics.cache_bytes.set_function(lambda: self._extents.stored_bytes)
        if self._folder is not None:
            for extent in self._folder.found:
                if not self._extents.adopt(extent):
                    self._folder.remove(extent)
            self._evict(self._folder, self._extents.shrink())
            _LOG.info("the cache has %d bytes", self._extents.stored_bytes)

    def read(self, key: str, size: int, offset: int, count: int) -> memoryview:
        """Bytes from `offset`, as many of `count` as lie in one extent: at least one.

        size: of the object. Raises CorruptObject if the object ends before it, ObjectMissing or Unavailable.
        """
        end = min(size, offset + count)
        while True:
            extent, data = self._obtain(key, size, offset, end)
            if data is not None:
                found = data[offset - extent.offset : end - extent.offset]
                self._metrics.cache_served_bytes.inc(len(found))
                return found

    def read_past(self, key: str, offset: int, count: int) -> memoryview:
        """Bytes straight from the store. Drops the cached copy, which the reader found to be damaged."""
        with self._lock:
            stale = self._extents.overlapping(key, offset, offset + count)
        self._drop(stale)
        return self._fetch(key, offset, count)

    def owners(self) -> set[tuple[str, Attempt]]:
        """The runs and attempts that have cached bytes."""
        with self._lock:
            keys = {extent.key: extent for extent in self._extents.stored()}
        return {extent.owner for extent in keys.values()}

    def drop(self, run: str, attempt: Attempt) -> None:
        """Delete the cached bytes of an attempt."""
        prefix = RunKeys(run).attempt(attempt)
        with self._lock:
            owned = [extent for extent in self._extents.stored() if extent.key.startswith(prefix)]
        self._drop(owned)

    def close(self) -> None:
        """Release the folder for another daemon."""
        if self._folder is not None:
            self._folder.close()

    def _obtain(self, key: str, size: int, offset: int, end: int) -> tuple[Extent, memoryview | None]:
        """The extent that has the byte at `offset`, and its bytes; None if the cached bytes are lost."""
        with self._lock:
            extent = self._extents.at(key, offset)
            if extent is None:
                extent = self._extents.claim(key, size, offset, end)
                ours = self._flights[extent] = Future()
            else:
                ours = None
                self._extents.use(extent)
            flight = self._flights.get(extent)
        if ours is not None:
            self._metrics.cache_misses.inc()
            return extent, self._fly(extent, ours)
        self._metrics.cache_hits.inc()
        return extent, flight.result() if flight else self._load(extent)

    def _fly(self, extent: Extent, flight: Future[memoryview]) -> memoryview:
        try:
            data = self._fetch(extent.key, extent.offset, extent.bytes)
        except BaseException as error:
            # Forget the extent before waking the waiters, so that the next reader fetches it from the store.
            self._land(extent, stored=False)
            flight.set_exception(error)
            raise
        flight.set_result(data)
        stored = False
        try:
            stored = self._keep(extent, data)
        finally:
            self._land(extent, stored)
        return data

    def _fetch(self, key: str, offset: int, count: int) -> memoryview:
        with self._may_read:
            data = memoryview(bytearray(count))
            self._store.get_range(key, offset, data)
        self._metrics.cache_store_bytes.inc(count)
        return data

    def _keep(self, extent: Extent, data: memoryview) -> bool:
        if self._folder is None:
            return False
        with self._lock:
            evicted = self._extents.make_room(extent)
            if evicted is None:
                return False
            self._evict(self._folder, evicted)
        try:
            self._folder.write(extent, data)
        except OSError as error:
            self._metrics.cache_failures.inc()
            if not self._complained:
                _LOG.warning("cannot write to the cache, reading from the store instead: %s", error)
            self._complained = True
            return False
        return True

    def _land(self, extent: Extent, stored: bool) -> None:
        with self._lock:
            del self._flights[extent]
            if stored:
                self._extents.store(extent)
            else:
                self._extents.forget(extent)

    def _load(self, extent: Extent) -> memoryview | None:
        assert self._folder is not None
        data = self._folder.read(extent)
        if data is None:
            self._drop([extent])
        return data

    def _drop(self, extents: Iterable[Extent]) -> None:
        if self._folder is None:
            return
        with self._lock:
            for extent in extents:
                if extent not in self._flights:
                    self._extents.forget(extent)
                    # Under the lock, so that the file cannot be written again meanwhile.
                    self._folder.remove(extent)

    def _evict(self, folder: Folder, extents: Sequence[Extent]) -> None:
        for extent in extents:
            folder.remove(extent)
        self._metrics.cache_evictions.inc(len(extents))
