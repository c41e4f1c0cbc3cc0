"""Serves until SIGTERM, then shuts down: /readyz fails, the port closes, open requests finish, exit code 0."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import socket
import ssl
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Protocol

import uvicorn
from fastapi import FastAPI
from uvicorn.config import STARTUP_FAILURE

from ckptd.http.concurrency import Waiting
from ckptd.http.connections import ConnectionLimits, LimitedListener, TimedProtocol
from ckptd.metrics import Metrics
from ckptd.settings import Settings
from ckptstore.errors import InvalidRequest

_LOG = logging.getLogger(__name__)
_KEEP_ALIVE_S = 75
_LAST_WAIT_S = 0.5
_SWITCH_S = 0.0005
_M_TRIM_THRESHOLD = -1  # of glibc's malloc.h
_M_MMAP_THRESHOLD = -3
_REUSED_BYTES = 32 << 20


class Served(Protocol):
    """The context of an app that is served, in its state."""

    metrics: Metrics
    waiting: Waiting
    leaving: bool
    """SIGTERM was received."""


class _Server(uvicorn.Server):
    """Unlike uvicorn, waits before it closes the port, and exits normally instead of by the signal."""

    def __init__(
        self, config: uvicorn.Config, context: Served, limits: ConnectionLimits, notice_s: float,
        on_listening: Callable[[str], None],
    ) -> None:  # fmt: skip
        super().__init__(config)
        self._on_listening = on_listening
        self._context = context
        self._limits = limits
        self._notice_s = notice_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(await self._bind())
        for server in self.servers:
            for listening in server.sockets:
                host, port = listening.getsockname()[:2]
                scheme = "https" if self.config.is_ssl else "http"
                url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
                _LOG.info("listening on %s", url)
                self._on_listening(url)

    async def _bind(self) -> list[socket.socket]:
        loop, config = asyncio.get_running_loop(), self.config
        try:
            bound = await loop.create_server(asyncio.Protocol, config.host, config.port, start_serving=False)
        except OSError as error:
            _LOG.error("cannot listen: %s", error)
            sys.exit(STARTUP_FAILURE)
        listeners: list[socket.socket] = [LimitedListener(os.dup(own.fileno()), self._limits) for own in bound.sockets]
        bound.close()
        return listeners

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._context.leaving:
            self._close()  # second signal: skip the notice period
            return
        self._context.leaving = True
        notice = threading.Timer(self._notice_s, self._close)
        notice.daemon = True
        notice.start()

    def _close(self) -> None:
        self.should_exit = True
        self._context.waiting.close()


def serve(app: FastAPI, settings: Settings, on_listening: Callable[[str], None] = lambda _: None) -> None:
    """Answer requests until a signal arrives, then drain. Returns when the last response was sent or timed out.

    on_listening: called with each URL that is open. Raises InvalidRequest if the certificate or its key cannot be used.
    """
    # A response takes under a millisecond; with Python's default of 5 ms it would wait for threads that parse listings.
    sys.setswitchinterval(_SWITCH_S)
    _reuse_memory()
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        loop="asyncio",  # another loop would not accept through LimitedListener
        http="h11",  # limits the size of headers; the faster parser does not
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(settings.drain_seconds)),
        ssl_certfile=settings.tls_cert or None,
        ssl_keyfile=settings.tls_key or None,
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise InvalidRequest(
            f"cannot use certificate {config.ssl_certfile} with key {config.ssl_keyfile}: {error}",
            "Use a certificate and its key, as PEM files that this user can read",
        ) from error
    context: Served = app.state.context
    limits = ConnectionLimits(settings.connections_per_client, settings.header_timeout_seconds, context.metrics)
    config.http_protocol_class = partial(TimedProtocol, limits)  # type: ignore[assignment]
    _Server(config, context, limits, settings.notice_seconds, on_listening).run()
    _LOG.info("stopped")
    if _is_stuck():
        # A read from a store that does not respond must not keep the process from exiting. Nothing is lost:
        # the data is in the store, and the index is closed.
        logging.shutdown()
        os._exit(0)


def _reuse_memory() -> None:
    """Make malloc keep the memory of cache blocks for reuse.

    glibc returns allocations of this size to the kernel at once, and faulting in the pages of each block again took
    half of the system time.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has no mallopt
        if mallopt is not None:
            mallopt(_M_MMAP_THRESHOLD, _REUSED_BYTES)
            mallopt(_M_TRIM_THRESHOLD, _REUSED_BYTES)


def _is_stuck() -> bool:
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread() and not thread.daemon]
    for thread in others:
        thread.join(_LAST_WAIT_S)
    return any(thread.is_alive() for thread in others)
