"""Limits of open connections: per client, by descriptors, and a time-out for the head of a request.

A client that connects and sends nothing needs no token. Without these limits it could take all descriptors. One
address gets a quarter of them at most, and at a limit the connections that have sent no request are closed first.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections import Counter
from contextlib import suppress
from time import monotonic
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from ckptd.metrics import Metrics

_LOG = logging.getLogger(__name__)
_RESERVED = 64
"""Descriptors kept for the index, the cache and the store."""
_SHARE = 4
"""A client may take this part of the descriptors: one quarter."""
_MAX_EVICTED = 16
"""Evicted connections that the event loop has not closed yet: their descriptors are still in use."""
_LOG_EVERY_S = 60.0


class ConnectionLimits:
    """Counts open connections per client address. For one event loop."""

    def __init__(self, per_client: int, head_timeout_s: float, metrics: Metrics) -> None:
        """per_client: 0 for no limit per address. head_timeout_s: see `TimedProtocol`."""
        self.head_timeout_s = head_timeout_s
        self._per_client = per_client
        self._closed = metrics.connections_closed
        self._counts: Counter[str] = Counter()
        self._silent: dict[Any, socket.socket] = {}
        self._evicted: set[Any] = set()
        self._logged_at = -_LOG_EVERY_S

    def admit(self, address: Any, accepted: socket.socket) -> bool:
        """Count a new connection; False if it must be closed. At a limit, it replaces one without a request."""
        client, usable = address[0], _usable_descriptors()
        most = min(self._per_client, usable // _SHARE) if self._per_client else float("inf")
        if self._counts[client] >= most and not self._evict(client):
            self.note_closed("client", f"{client} has {most:.0f} connections, the most that a client may have")
            return False
        # The system assigns the lowest free number, so this many descriptors are in use.
        excess = accepted.fileno() - usable
        while len(self._evicted) <= excess and self._evict(self._most_silent()):
            pass
        if len(self._evicted) <= excess:
            self.note_closed("descriptors", f"{accepted.fileno()} descriptors are in use, and the rest is reserved")
            return False
        self._counts[client] += 1
        self._silent[address] = accepted
        return True

    def note_request(self, address: Any) -> None:
        """A connection has sent the head of a request."""
        self._silent.pop(address, None)

    def release(self, address: Any) -> None:
        """A connection that was admitted is closed."""
        self._silent.pop(address, None)
        self._evicted.discard(address)
        self._counts[address[0]] -= 1
        if not self._counts[address[0]]:
            del self._counts[address[0]]

    @property
    def evicting(self) -> bool:
        """Whether connections that were evicted must be closed before more are accepted."""
        return len(self._evicted) >= _MAX_EVICTED

    def _most_silent(self) -> str | None:
        clients = Counter(address[0] for address in self._silent)
        return clients.most_common(1)[0][0] if clients else None

    def _evict(self, client: str | None) -> bool:
        """End the oldest connection of a client that has sent no request. The event loop closes it in its next turn."""
        address = next((address for address in self._silent if address[0] == client), None)
        if address is None:
            return False
        self._evicted.add(address)
        with suppress(OSError):  # the peer has closed it
            self._silent.pop(address).shutdown(socket.SHUT_RDWR)
        self.note_closed("silent", f"{client} has sent no request on it")
        return True

    def note_closed(self, reason: str, text: str) -> None:
        """Count a connection that is closed because of a limit; logs at most once a minute."""
        self._closed.labels(reason).inc()
        if monotonic() - self._logged_at >= _LOG_EVERY_S:
            self._logged_at = monotonic()
            _LOG.warning("closed a connection: %s (logged once a minute; see ckptd_connections_closed_total)", text)


def _usable_descriptors() -> float:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft - min(_RESERVED, soft // 4) if soft != resource.RLIM_INFINITY else float("inf")


class LimitedListener(socket.socket):
    """A listening socket that closes connections beyond the limits as soon as it accepts them.

    This is before a TLS handshake, so connections without one are counted, too.
    """

    def __init__(self, descriptor: int, limits: ConnectionLimits) -> None:
        """descriptor: of a bound socket; belongs to this object from now on."""
        super().__init__(fileno=descriptor)
        self._limits = limits

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection. Raises ConnectionAbortedError, which event loops ignore, if it is beyond the limits, or
        BlockingIOError if they have to close others first: it waits in the queue of the system meanwhile."""
        if self._limits.evicting:
            raise BlockingIOError("evicted connections are not closed yet")
        accepted, address = super().accept()
        counted = _CountedSocket(accepted, address)
        if not self._limits.admit(address, counted):
            counted.close()
            raise ConnectionAbortedError("beyond the limits of connections")
        counted.limits = self._limits
        return counted, address


class _CountedSocket(socket.socket):
    limits: ConnectionLimits | None = None
    """Set once they count it."""

    def __init__(self, accepted: socket.socket, address: Any) -> None:
        super().__init__(accepted.family, accepted.type, accepted.proto, fileno=accepted.detach())
        self._address = address

    def close(self) -> None:
        super().close()
        if self.limits is not None:
            self.limits.release(self._address)
            self.limits = None


class TimedProtocol(H11Protocol):
    """Aborts a connection if it is open, or receives data, for `head_timeout_s` without the head of a request.

    uvicorn closes connections that are idle after a response, but not new ones, and not those with part of a head.
    """

    def __init__(self, limits: ConnectionLimits, **options: Any) -> None:
        """options: uvicorn's."""
        super().__init__(**options)
        self._limits = limits
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        """Handle data, then wait for the rest of the head if it is not complete."""
        super().data_received(data)
        if self.cycle is not None:
            self._limits.note_request(self.transport.get_extra_info("peername"))
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._cancel_head_timer()
        super().connection_lost(exc)

    def _watch_head(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._cancel_head_timer()
        elif self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self._limits.head_timeout_s, self._head_timed_out)

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_timed_out(self) -> None:
        self._limits.note_closed("header_timeout", f"no request within {self._limits.head_timeout_s:g} s")
        self.transport.abort()
