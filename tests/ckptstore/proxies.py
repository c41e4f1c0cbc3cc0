"""An HTTP proxy that loses, damages, refuses or delays chosen requests and replies, or sends requests twice."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import urlsplit

Fault = Literal["reset", "hang", "twice", "flip", "cut"]
"""The request is forwarded, and then the connection is reset, or nothing is ever answered; or the request is
forwarded twice, as by a client library that tries again, and the second reply is the answer. flip: one bit of the
request's body is another one. cut: the reply ends in the middle of its body."""

_TIMEOUT_S = 60.0
_SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
_HOP = {"connection", "expect", "keep-alive", "transfer-encoding", "content-length"}


@dataclass(frozen=True)
class Answered:
    """A request that was forwarded and answered, with times of time.monotonic()."""

    request: str
    received_at: float
    replied_at: float


@dataclass
class LossyProxy:
    """A proxy in front of one service. Counts requests from 0 since it was last armed."""

    url: str
    fault: Fault | None = None
    at: int = -1
    requests: list[str] = field(default_factory=list)
    refuses: Callable[[str], bool] = lambda _: False
    """These are answered with 403 and not forwarded."""
    away: Literal["busy", "silent"] | None = None
    """Every request is answered with 503 SlowDown, or never, and not forwarded."""
    chunks: Callable[[str], bool] = lambda _: False
    """The replies to these have no length: their bodies come in chunks."""
    round_trip_s: float = 0.0
    """Each reply is held back for this time."""
    answered: list[Answered] = field(default_factory=list)
    """In the order of the replies."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def arm(self, fault: Fault | None, at: int = -1) -> None:
        """Count from 0 again; the request numbered `at` will meet the fault."""
        with self._lock:
            self.fault, self.at = fault, at
            self.requests, self.answered = [], []

    def take(self, request: str) -> Fault | None:
        """Count a request; the fault that it meets."""
        with self._lock:
            self.requests.append(request)
            return self.fault if len(self.requests) - 1 == self.at else None


@contextmanager
def lossy_proxy(target: str) -> Iterator[LossyProxy]:
    """A proxy on a free port of this machine in front of the service at `target`, an http:// URL."""
    host, server = urlsplit(target).netloc, _Server(("127.0.0.1", 0), _Handler)
    server.target = host
    server.proxy = LossyProxy(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="lossy proxy")
    thread.start()
    try:
        yield server.proxy
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    target: str
    proxy: LossyProxy

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.closing = threading.Event()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away: what these tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def _relay(self) -> None:
        assert "Transfer-Encoding" not in self.headers, "requests of known length only"
        received_at = time.monotonic()
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        request = f"{self.command} {self.path}"
        fault = self.server.proxy.take(request)
        if self._turned_away(request):
            return
        if fault == "flip":
            body = bytes([body[0] ^ 1]) + body[1:]
        status, headers, answer = self._forward(body)
        if fault == "twice":
            status, headers, answer = self._forward(body)
        elif fault == "hang":
            self.server.closing.wait(_TIMEOUT_S)
        if fault in ("reset", "hang"):
            # Closing now sends RST.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()
            return
        proxy = self.server.proxy
        self.server.closing.wait(proxy.round_trip_s)
        proxy.answered.append(Answered(request, received_at, time.monotonic()))
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        if self.server.proxy.chunks(request):
            self.send_header("Transfer-Encoding", "chunked")
            answer = b"%x\r\n%b\r\n0\r\n\r\n" % (len(answer), answer)
        elif self.command != "HEAD":
            self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        if fault == "cut":
            answer = answer[: len(answer) // 2]
            self.close_connection = True
        self.wfile.write(answer)

    def _turned_away(self, request: str) -> bool:
        proxy = self.server.proxy
        if proxy.refuses(request):
            self.send_error(403)
        elif proxy.away == "busy":
            self.send_response(503)
            self.send_header("Content-Length", str(len(_SLOW_DOWN)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(_SLOW_DOWN)
        elif proxy.away == "silent":
            self.server.closing.wait(_TIMEOUT_S)
            self.close_connection = True
        else:
            return False
        return True

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _relay  # noqa: N815

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(self.server.target, timeout=_TIMEOUT_S)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in _HOP:
                    connection.putheader(name, value)
            connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            reply = connection.getresponse()
            drop = _HOP if self.command != "HEAD" else _HOP - {"content-length"}
            headers = [(name, value) for name, value in reply.getheaders() if name.lower() not in drop]
            return reply.status, headers, reply.read()
        finally:
            connection.close()

    def log_message(self, *_: Any) -> None:
        """Silent."""
