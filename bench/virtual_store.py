"""A store and a clock for simulations: requests take the time that an object store would take, processor time is real.

Everything runs in one thread. A simulated process sets `Clock.now` and calls real code; each request moves the clock to
its end, and the processor time of the code between two requests is added as it is measured. Objects become visible at
the end of the request that writes them. `Lanes` stands for ThreadPoolExecutor: requests of its threads overlap, their
processor time does not, because Python runs one thread at a time.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapreplace
from typing import Any, TypeVar

from ckptstore.codecs.chunk_codecs import Buffer
from ckptstore.errors import ObjectMissing
from ckptstore.stores.base import ObjectInfo, ObjectWriter, Store

_T = TypeVar("_T")
_BIN_S = 0.01


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the store: those of S3, and of one connection to it."""

    latency_s: float = 0.02
    puts_per_s: float = 3500.0
    gets_per_s: float = 5500.0
    """Also of listings and of looks at one object. Both limits are for one prefix, which here is a folder."""
    keys_per_page: int = 1000
    bytes_per_s: float = 90e6
    """Bandwidth of one request."""


class Clock:
    """Virtual seconds since the epoch, of the simulated process that runs now."""

    def __init__(self, now: float) -> None:
        self.now = now
        self.spent = 0.0
        """Processor seconds of all simulated processes."""
        self._resumed = time.process_time()

    def __call__(self) -> float:
        """Now: a `ckptstore.clock.Clock`."""
        return self.now

    def monotonic(self) -> float:
        """Now: stands for `time.monotonic`."""
        self.work()
        return self.now

    def work(self) -> None:
        """Add the processor time since the last request."""
        resumed, self._resumed = self._resumed, time.process_time()
        self.spent += self._resumed - resumed
        self.now += self._resumed - resumed

    def resume(self, now: float) -> None:
        """A request ends at this moment, or another process runs; what the simulation itself took does not count."""
        self.now = now
        self._resumed = time.process_time()


class _Rate:
    """Requests are admitted in the order of the simulation, at most so many in each hundredth of a second."""

    def __init__(self, per_s: float) -> None:
        self._each = max(1, round(per_s * _BIN_S))
        self._used: dict[int, int] = defaultdict(int)
        self._full_until: dict[int, int] = {}

    def admit(self, now: float) -> float:
        first = at = int(now / _BIN_S)
        while self._used[at] >= self._each:
            at = self._full_until.get(at, at + 1)
        self._used[at] += 1
        if at > first:
            self._full_until[first] = at
        return max(now, at * _BIN_S)


@dataclass(slots=True)
class Requests:
    """Requests of one simulated process, or of several."""

    count: Counter[str] = field(default_factory=Counter)
    sent_bytes: int = 0
    received_bytes: int = 0


class VirtualStore(Store):
    """Objects in memory, behind the limits of a store. For one thread."""

    url = "virtual://store"
    identity = "virtual"
    parallel_reads = 8
    retry_s = 120.0  # as if it repeated requests itself: none fails

    def __init__(self, clock: Clock, limits: Limits) -> None:
        self.clock = clock
        self.limits = limits
        self.requests = Requests()
        """Where requests are counted; the simulation sets it for each process."""
        self._keys: list[str] = []
        self._objects: dict[str, tuple[float, bytes]] = {}
        self._puts: dict[str, _Rate] = defaultdict(lambda: _Rate(limits.puts_per_s))
        self._gets: dict[str, _Rate] = defaultdict(lambda: _Rate(limits.gets_per_s))

    def stored_bytes(self) -> int:
        """Bytes of all objects."""
        return sum(len(data) for _, data in self._objects.values())

    def place(self, key: str, data: bytes) -> None:
        """Another process has written an object, which is visible now. Takes no virtual time."""
        if key not in self._objects:
            insort(self._keys, key)
        self._objects[key] = self.clock.now, data

    def put(self, key: str, data: Buffer) -> None:
        """One PUT."""
        with_data = bytes(data)
        end = self._request("PUT", key, len(with_data), self._puts)
        if key not in self._objects:
            insort(self._keys, key)
        self._objects[key] = end, with_data
        self.clock.resume(end)

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        """One PUT. The order of the simulation decides who is first."""
        if key in self._objects:
            self.clock.resume(self._request("PUT", key, 0, self._puts))
            return False
        self.put(key, data)
        return True

    def get(self, key: str) -> bytes:
        """One GET."""
        data = self._visible(key)
        self.clock.resume(self._request("GET", key, len(data or b""), self._gets))
        if data is None:
            raise ObjectMissing(f"{key} does not exist")
        return data

    def size(self, key: str) -> int:
        """One HEAD."""
        data = self._visible(key)
        self.clock.resume(self._request("HEAD", key, 0, self._gets))
        if data is None:
            raise ObjectMissing(f"{key} does not exist")
        return len(data)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """A request per page, one after the other."""
        self.clock.work()
        found = [*self.listed(prefix)]
        self.clock.resume(self.clock.now)
        for _ in range(max(1, -(-len(found) // self.limits.keys_per_page))):
            self.clock.resume(self._request("LIST", prefix, 0, self._gets))
        return iter(found)

    def listed(self, prefix: str) -> Iterator[ObjectInfo]:
        """The visible objects below a prefix. Takes no virtual time."""
        for at in range(bisect_left(self._keys, prefix), len(self._keys)):
            key = self._keys[at]
            if not key.startswith(prefix):
                break
            visible_at, data = self._objects[key]
            if visible_at <= self.clock.now:
                yield ObjectInfo(key, len(data), visible_at)

    def list_folders(self, prefix: str) -> Iterator[str]:
        """A request per page. Here a folder is listed as soon as one of its objects was written."""
        self.clock.work()
        names: list[str] = []
        at = bisect_left(self._keys, prefix)
        while at < len(self._keys) and self._keys[at].startswith(prefix):
            names.append(self._keys[at][len(prefix) :].partition("/")[0])
            at = bisect_left(self._keys, f"{prefix}{names[-1]}0")  # 0 follows the slash
        self.clock.resume(self.clock.now)
        for _ in range(max(1, -(-len(names) // self.limits.keys_per_page))):
            self.clock.resume(self._request("LIST", prefix, 0, self._gets))
        return iter(names)

    def open_writer(self, key: str, size_hint: int = 0) -> ObjectWriter:
        """Shards have no bytes here: the simulation counts their parts."""
        raise NotImplementedError

    def read_into(self, key: str, offset: int, buffer: memoryview) -> int:
        """Shards have no bytes here."""
        raise NotImplementedError

    def delete_many(self, keys: Iterable[str]) -> None:
        """Nothing is deleted."""
        raise NotImplementedError

    def _visible(self, key: str) -> bytes | None:
        self.clock.work()
        visible_at, data = self._objects.get(key, (0.0, None))
        return data if visible_at <= self.clock.now else None

    def _request(self, kind: str, key: str, num_bytes: int, rates: dict[str, _Rate]) -> float:
        """The moment at which a request that is sent now ends."""
        self.clock.work()
        self.requests.count[kind] += 1
        if kind == "PUT":
            self.requests.sent_bytes += num_bytes
        else:
            self.requests.received_bytes += num_bytes
        begin = rates[key.rpartition("/")[0]].admit(self.clock.now)
        return begin + self.limits.latency_s + num_bytes / self.limits.bytes_per_s


def lanes_of(clock: Clock) -> type:
    """A class that stands for ThreadPoolExecutor, in the time of `clock`."""

    class Lanes:
        def __init__(self, max_workers: int, thread_name_prefix: str = "") -> None:
            self._workers = max_workers

        def __enter__(self) -> Lanes:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def submit(self, work: Callable[..., Any], *args: Any) -> None:
            """Threads that a process keeps: the simulation runs their work itself."""

        def map(self, work: Callable[..., _T], *items: Iterable[Any]) -> list[_T]:
            """Each lane takes the next item when it is free."""
            clock.work()
            began, spent = clock.now, clock.spent
            lanes = [began] * self._workers
            results: list[_T] = []
            for each in zip(*items, strict=False):
                clock.resume(lanes[0])
                results.append(work(*each))
                clock.work()
                heapreplace(lanes, clock.now)
            clock.resume(max(*lanes, began + clock.spent - spent))
            return results

    return Lanes
