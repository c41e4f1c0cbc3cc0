"""A store that takes shards as fast as a test says, and keeps everything but them."""

from __future__ import annotations

import time

from ckptstore.format.codecs import Buffer
from ckptstore.stores import ObjectWriter, Store
from ckptstore.stores.wrapping import WrappedStore


class Sink(WrappedStore):
    """Another store for documents; what is written to it from front to back is gone."""

    def __init__(self, store: Store, seconds_per_byte: float) -> None:
        super().__init__(store)
        self.seconds_per_byte = seconds_per_byte

    def open_writer(self, key: str, size_hint: int = 0) -> ObjectWriter:
        """One that takes its time."""
        return _Writer(self.seconds_per_byte)


class _Writer(ObjectWriter):
    def __init__(self, seconds_per_byte: float) -> None:
        self._seconds_per_byte = seconds_per_byte

    def write(self, data: Buffer) -> None:
        if self._seconds_per_byte:
            time.sleep(memoryview(data).nbytes * self._seconds_per_byte)

    def commit(self) -> None:
        pass

    def abort(self) -> None:
        pass
