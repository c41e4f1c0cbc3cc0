"""Fairness between clients: a semaphore that rotates between them, and limits per client. For one event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from weakref import WeakValueDictionary

from ckptstore.errors import TooManyRequests


class FairSemaphore:
    """A semaphore that serves waiting clients in rotation, regardless of how many requests each of them has."""

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def slot(self, client: str) -> AsyncIterator[None]:
        """Hold one of the `limit` places while the block runs; waits for it."""
        await self._take(client)
        try:
            yield
        finally:
            self._give()

    async def _take(self, client: str) -> None:
        if self._free:
            self._free -= 1
            return
        granted = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(granted)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self._give()  # granted at the same time as the cancellation
            raise

    def _give(self) -> None:
        while self._waiting:
            client, queue = self._waiting.popitem(last=False)
            granted = queue.popleft()
            if queue:
                self._waiting[client] = queue  # back of the rotation
            if not granted.done():
                granted.set_result(None)
                return
        self._free += 1


@dataclass
class ConcurrencyLimit:
    """Limits concurrent use, per client and in total."""

    _what: str
    _per_client: int
    _total: int

    def __post_init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._sum = 0

    @contextmanager
    def use(self, client: str) -> Iterator[None]:
        """Count one use while the block runs. Raises TooManyRequests."""
        if self._counts[client] >= self._per_client or self._sum >= self._total:
            count, limit, whose = self._sum, self._total, "all clients"
            if self._sum < self._total:
                count, limit, whose = self._counts[client], self._per_client, "this client"
            raise TooManyRequests(
                f"{whose} have {count} {self._what} open; the limit is {limit}", "Close some, or wait"
            )
        self._counts[client] += 1
        self._sum += 1
        try:
            yield
        finally:
            self._sum -= 1
            self._counts[client] -= 1
            if not self._counts[client]:
                del self._counts[client]


class Waiting:
    """Wakes requests that wait for a topic. `wake` and `close` may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._events: dict[str, set[asyncio.Event]] = {}
        self.closed = False
        """The daemon shuts down: requests must not wait any more."""

    @contextmanager
    def listen(self, id: str) -> Iterator[asyncio.Event]:
        """An event that is set when `id` changes or the daemon shuts down. Listen first, then check, then wait."""
        event = asyncio.Event()
        with self._lock:
            self._loop = asyncio.get_running_loop()
            self._events.setdefault(id, set()).add(event)
            if self.closed:
                event.set()
        try:
            yield event
        finally:
            with self._lock:
                self._events[id].discard(event)
                if not self._events[id]:
                    del self._events[id]

    def count(self) -> int:
        """How many requests listen."""
        with self._lock:
            return sum(map(len, self._events.values()))

    def wake(self, id: str) -> None:
        """Set the events of the requests that listen to `id`."""
        with self._lock:
            for event in self._events.get(id, ()):
                self._set(event)

    def close(self) -> None:
        """Wake all requests, now and from now on: the daemon shuts down."""
        with self._lock:
            self.closed = True
            for events in self._events.values():
                for event in events:
                    self._set(event)

    def _set(self, event: asyncio.Event) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(event.set)


async def happens(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event; False if it is not set within `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


class KeyedLocks:
    """One lock per name. For one event loop."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def of(self, name: str) -> asyncio.Lock:
        """The lock of a name; it is dropped when it is no longer used."""
        return self._locks.setdefault(name, asyncio.Lock())
