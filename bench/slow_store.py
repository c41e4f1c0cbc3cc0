"""A store that is slow as remote ones are: SeaweedFS behind a proxy with a round trip time and a limited bandwidth."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from tests.support import seaweed
from tests.support.seaweed import S3Service

_PART_BYTES = 64 << 10


class SlowProxy:
    """Forwards TCP connections. Each direction of a connection is delayed; all bytes share one bandwidth."""

    def __init__(self, host: str, port: int, round_trip_s: float, bytes_per_s: float) -> None:
        self._target = host, port
        self._delay_s = round_trip_s / 2
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self.forwarded = 0
        """Bytes, both directions together."""
        self.port = 0

    async def serve(self, ready: threading.Event, end: asyncio.Event) -> None:
        """Accept connections on a free port of 127.0.0.1 until `end`."""
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0, limit=_PART_BYTES)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        await end.wait()
        server.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.CancelledError):
            other_reader, other_writer = await asyncio.open_connection(*self._target, limit=_PART_BYTES)
            await asyncio.gather(self._forward(reader, other_writer), self._forward(other_reader, writer))

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        clock = asyncio.get_running_loop().time
        arrived_at = 0.0
        try:
            while part := await reader.read(_PART_BYTES):
                now = clock()
                if now - arrived_at > self._delay_s:  # a message begins; what follows it is on its way already
                    await asyncio.sleep(self._delay_s)
                self._free_at = max(self._free_at, now) + len(part) / self._bytes_per_s
                await asyncio.sleep(max(0.0, self._free_at - clock()))
                writer.write(part)
                await writer.drain()
                self.forwarded += len(part)
                arrived_at = clock()
        except OSError:
            pass
        finally:
            writer.close()


@contextmanager
def running_proxy(host: str, port: int, round_trip_s: float, bytes_per_s: float) -> Iterator[SlowProxy]:
    """A proxy in a thread of its own."""
    proxy, ready = SlowProxy(host, port, round_trip_s, bytes_per_s), threading.Event()
    loop, end = asyncio.new_event_loop(), asyncio.Event()

    def work() -> None:
        loop.run_until_complete(proxy.serve(ready, end))
        rest = asyncio.all_tasks(loop)
        for task in rest:
            task.cancel()
        if rest:
            loop.run_until_complete(asyncio.wait(rest))
        loop.close()

    thread = threading.Thread(target=work, name="slow-proxy")
    thread.start()
    try:
        if not ready.wait(30):
            raise RuntimeError("the proxy did not start")
        yield proxy
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join()


@contextmanager
def slow_service(round_trip_s: float, bytes_per_s: float) -> Iterator[tuple[S3Service, S3Service, SlowProxy]]:
    """A service with an empty bucket: the way through the proxy, the direct way, and the proxy."""
    with tempfile.TemporaryDirectory(prefix="ckptd-bench-") as folder, seaweed.running_service(Path(folder)) as direct:
        where = urlsplit(direct.endpoint)
        assert where.hostname is not None
        assert where.port is not None
        with running_proxy(where.hostname, where.port, round_trip_s, bytes_per_s) as proxy:
            yield replace(direct, endpoint=f"http://127.0.0.1:{proxy.port}"), direct, proxy
