"""Long polling without a thread per request, and locks per key."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary


class Waiting:
    """Wakes requests that wait for a topic. `wake` and `close` may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._events: dict[str, set[asyncio.Event]] = {}
        self._closed = False

    @contextmanager
    def listen(self, id: str) -> Iterator[asyncio.Event]:
        """An event that is set when `id` changes or the daemon shuts down. Listen first, then check, then wait."""
        event = asyncio.Event()
        with self._lock:
            self._loop = asyncio.get_running_loop()
            self._events.setdefault(id, set()).add(event)
            if self._closed:
                event.set()
        try:
            yield event
        finally:
            with self._lock:
                self._events[id].discard(event)
                if not self._events[id]:
                    del self._events[id]

    @property
    def closed(self) -> bool:
        """The daemon shuts down: requests must not wait any more."""
        return self._closed

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
            self._closed = True
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
