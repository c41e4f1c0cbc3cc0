"""A store that counts what is read from it, and an app on a port of this process, so that the test sees the counts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from ckptstore.stores import Store
from tests.support.stores import Faults, FaultyStore
from tests.support.waiting import wait_until


class CountingStore(FaultyStore):
    """Another store, every read of which is noted; ranged ones are held or failed by `before_read`."""

    def __init__(self, store: Store) -> None:
        super().__init__(store, Faults())
        self.reads: list[tuple[str, int, int]] = []
        """Key, offset and bytes."""
        self.documents: list[tuple[str, int]] = []
        """Key and bytes of those that were read whole."""
        self.most_at_a_time = 0
        self.before_read: Callable[[], object] = lambda: None
        self._at_a_time = 0
        self._lock = threading.Lock()

    def get(self, key: str) -> bytes:
        data = super().get(key)
        with self._lock:
            self.documents.append((key, len(data)))
        return data

    def read_into(self, key: str, offset: int, buffer: memoryview) -> int:
        with self._lock:
            self.reads.append((key, offset, len(buffer)))
            self._at_a_time += 1
            self.most_at_a_time = max(self.most_at_a_time, self._at_a_time)
        try:
            self.before_read()
            return super().read_into(key, offset, buffer)
        finally:
            with self._lock:
                self._at_a_time -= 1

    @property
    def read_bytes(self) -> int:
        """Of all ranged reads together."""
        return sum(count for _, _, count in self.reads)

    @property
    def all_bytes(self) -> int:
        """Of all reads together."""
        return self.read_bytes + sum(count for _, count in self.documents)


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """The app on a free port of this machine; yields its URL."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, access_log=False))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started, "the server's start")
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
