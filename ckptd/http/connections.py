"""Limits of open connections: per client, by descriptors, and a time-out for the head of a request.

A client that connects and sends nothing needs no token. Without these limits it could take all descriptors.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections import Counter
from time import monotonic
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from ckptd.metrics import Metrics

_LOG = logging.getLogger(__name__)
_RESERVED = 64
"""Descriptors kept for the index, the cache and the store."""
_LOG_EVERY_S = 60.0


class ConnectionLimits:
    """Counts open connections per client address. For one event loop."""

    def __init__(self, per_client: int, head_timeout_s: float, metrics: Metrics) -> None:
        """per_client: 0 for no limit per address. head_timeout_s: see `TimedProtocol`."""
        self.head_timeout_s = head_timeout_s
        self._per_client = per_client
        self._closed = metrics.connections_closed
        self._counts: Counter[str] = Counter()
        self._logged_at = -_LOG_EVERY_S

    def admit(self, client: str, descriptor: int) -> bool:
        """Count a new connection; False if it must be closed. descriptor: that of its socket."""
        if self._per_client and self._counts[client] >= self._per_client:
            self.note_closed("client", f"{client} has {self._per_client} connections, the most that a client may have")
            return False
        # The system assigns the lowest free number, so this many descriptors are in use.
        if descriptor >= _usable_descriptors():
            self.note_closed("descriptors", f"{descriptor} descriptors are in use, and the rest is reserved")
            return False
        self._counts[client] += 1
        return True

    def release(self, client: str) -> None:
        """A connection that was admitted is closed."""
        self._counts[client] -= 1
        if not self._counts[client]:
            del self._counts[client]

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
        """Accept a connection. Raises ConnectionAbortedError, which event loops ignore, if it is beyond the limits."""
        accepted, address = super().accept()
        client = str(address[0])
        if not self._limits.admit(client, accepted.fileno()):
            accepted.close()
            raise ConnectionAbortedError("beyond the limits of connections")
        return _CountedSocket(accepted, client, self._limits), address


class _CountedSocket(socket.socket):
    def __init__(self, accepted: socket.socket, client: str, limits: ConnectionLimits) -> None:
        super().__init__(accepted.family, accepted.type, accepted.proto, fileno=accepted.detach())
        self._client = client
        self._limits: ConnectionLimits | None = limits

    def close(self) -> None:
        super().close()
        if self._limits is not None:
            self._limits.release(self._client)
            self._limits = None


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
