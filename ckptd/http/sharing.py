"""Fairness between clients: a semaphore that rotates between them, and limits per client. For one event loop."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

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


class ConcurrencyLimit:
    """Limits concurrent use, per client and in total."""

    def __init__(self, what: str, per_client: int, total: int) -> None:
        self._what = what
        self._per_client = per_client
        self._total = total
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
