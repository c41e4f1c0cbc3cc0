"""Stores that fail on purpose, and a clock that tests move."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import uvicorn
from fastapi import FastAPI

from ckptstore.clock import system_clock
from ckptstore.codecs.chunk_codecs import Buffer
from ckptstore.errors import ObjectMissing, StoreUnavailable
from ckptstore.stores import ObjectInfo, ObjectWriter, Store
from tests.support.waiting import wait_until

_T = TypeVar("_T")
Mode = Literal["before", "after"]


@dataclass
class MovableClock:
    """The real time, ahead by as much as the test says."""

    ahead_s: float = 0.0

    def __call__(self) -> float:
        return system_clock() + self.ahead_s

    def advance(self, seconds: float) -> None:
        self.ahead_s += seconds


@dataclass
class Faults:
    """Makes one call of a store fail: the one numbered `fail_at`, counted from 0 over all its methods.

    before: nothing happened. after: it happened, and the reply was lost. killed: this process, before or after.
    """

    fail_at: int = -1
    mode: Mode = "before"
    killed: bool = False
    calls: list[str] = field(default_factory=list)

    def around(self, what: str, call: Callable[[], _T]) -> _T:
        """Do `call`, or fail in its place, or fail after it."""
        failing = len(self.calls) == self.fail_at
        self.calls.append(what)
        if failing and self.mode == "before":
            self._kill()
            raise StoreUnavailable(f"{what}: injected, nothing happened")
        result = call()
        if failing:
            self._kill()
            raise StoreUnavailable(f"{what}: injected, the reply was lost")
        return result

    def _kill(self) -> None:
        if self.killed:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Interleaving:
    """Lets another process act just before the call numbered `at`."""

    at: int
    act: Callable[[], object]
    calls: list[str] = field(default_factory=list)

    def around(self, what: str, call: Callable[[], _T]) -> _T:
        """Do `call`, after the other one if it is time."""
        number = len(self.calls)
        self.calls.append(what)
        if number == self.at:
            self.act()
        return call()


class FaultyStore(Store):
    def __init__(self, store: Store, faults: Faults | Interleaving) -> None:
        self._store = store
        self._faults = faults
        self.url = store.url
        self.identity = f"{store.identity} behind {id(self)}"
        self.shared_between_processes = store.shared_between_processes

    @property
    def on_this_host(self) -> bool:
        return self._store.on_this_host

    def put(self, key: str, data: Buffer) -> None:
        self._faults.around(f"put {key}", lambda: self._store.put(key, data))

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        return self._faults.around(f"put_if_absent {key}", lambda: self._store.put_if_absent(key, data))

    def open_writer(self, key: str, size_hint: int = 0) -> ObjectWriter:
        writer = self._faults.around(f"open_writer {key}", lambda: self._store.open_writer(key, size_hint))
        return _FaultyWriter(writer, self._faults, key)

    def open_replacement(self, key: str, size_hint: int = 0) -> ObjectWriter:
        writer = self._faults.around(f"open_replacement {key}", lambda: self._store.open_replacement(key, size_hint))
        return _FaultyWriter(writer, self._faults, key)

    def get(self, key: str) -> bytes:
        return self._faults.around(f"get {key}", lambda: self._store.get(key))

    def read_into(self, key: str, offset: int, buffer: memoryview) -> int:
        return self._faults.around(f"read_into {key}", lambda: self._store.read_into(key, offset, buffer))

    def size(self, key: str) -> int:
        return self._faults.around(f"size {key}", lambda: self._store.size(key))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return iter(self._faults.around(f"list {prefix}", lambda: [*self._store.list(prefix)]))

    def list_folders(self, prefix: str) -> Iterator[str]:
        return iter(self._faults.around(f"list_folders {prefix}", lambda: [*self._store.list_folders(prefix)]))

    def delete_many(self, keys: Iterable[str]) -> None:
        # One call per object, so that a deletion is interrupted in the middle as well.
        for key in keys:
            self._faults.around(f"delete {key}", lambda key=key: self._store.delete_many([key]))  # type: ignore[misc]


class _FaultyWriter(ObjectWriter):
    def __init__(self, writer: ObjectWriter, faults: Faults | Interleaving, key: str) -> None:
        self._writer = writer
        self._faults = faults
        self._key = key

    def write(self, data: Buffer) -> None:
        self._faults.around(f"write {self._key}", lambda: self._writer.write(data))

    def commit(self) -> None:
        self._faults.around(f"commit {self._key}", self._writer.commit)

    def abort(self) -> None:
        self._writer.abort()


def race(*contestants: Callable[[], _T]) -> list[_T | BaseException]:
    """What each contestant returned or raised, all started at the same moment in threads of their own."""
    start = threading.Barrier(len(contestants))
    results: list[_T | BaseException] = [RuntimeError("did not run")] * len(contestants)

    def run(index: int) -> None:
        start.wait()
        try:
            results[index] = contestants[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(contestants))]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads of Python change places as often as they can
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    return results


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
        return sum(count for _, _, count in self.reads)

    @property
    def all_bytes(self) -> int:
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


@dataclass
class FakeClock:
    """Stands still. Jumps do not reach the store: they are the fault of one machine."""

    now: float = 1_700_000_000.0
    jump_s: float = 0.0

    def __call__(self) -> float:
        return self.now + self.jump_s

    def true_time(self) -> float:
        """What the store goes by."""
        return self.now


class DictStore(Store):
    """Keeps every promise of a store, and its objects in memory."""

    one_winner = True

    def __init__(self, clock: FakeClock) -> None:
        self.url = self.identity = "dict://"
        self._clock = clock
        self._objects: dict[str, tuple[bytes, float]] = {}
        self._lock = threading.Lock()

    def put(self, key: str, data: Buffer) -> None:
        with self._lock:
            self._objects[key] = (bytes(data), self._clock.true_time())

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        with self._lock:
            if key in self._objects:
                return False
            self._objects[key] = (bytes(data), self._clock.true_time())
            return True

    def open_writer(self, key: str, size_hint: int = 0) -> ObjectWriter:
        return self.open_replacement(key, size_hint)  # one put of all bytes

    def get(self, key: str) -> bytes:
        try:
            return self._objects[key][0]
        except KeyError:
            raise ObjectMissing(f"{key} does not exist") from None

    def read_into(self, key: str, offset: int, buffer: memoryview) -> int:
        data = self.get(key)[offset : offset + len(buffer)]
        buffer[: len(data)] = data
        return len(data)

    def size(self, key: str) -> int:
        return len(self.get(key))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        with self._lock:
            found = sorted(item for item in self._objects.items() if item[0].startswith(prefix))
        return iter([ObjectInfo(key, len(data), at) for key, (data, at) in found])

    def list_folders(self, prefix: str) -> Iterator[str]:
        rest = [info.key.removeprefix(prefix) for info in self.list(prefix)]
        return iter(sorted({key.split("/")[0] for key in rest if "/" in key}))

    def delete_many(self, keys: Iterable[str]) -> None:
        for key in list(keys):
            with self._lock:
                self._objects.pop(key, None)
