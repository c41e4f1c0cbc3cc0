"""A server that gives prepared answers, one per request, and records the requests."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from ckptapi import bodies
from ckptapi.client import DaemonClient


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer; status 0 closes the connection without one."""

    status: int = 200
    body: bytes = b"{}"
    headers: dict[str, str] = field(default_factory=dict)


NO_ANSWER = Answer(0)


def answer(body: msgspec.Struct, status: int = 200) -> Answer:
    return Answer(status, msgspec.json.encode(body), {"Content-Type": "application/json"})


def problem(status: int, code: str, detail: str = "as tested", hint: str = "") -> Answer:
    body = bodies.Problem(type="about:blank", title=code, status=status, detail=detail, code=code, hint=hint)
    return Answer(status, msgspec.json.encode(body), {"Content-Type": bodies.PROBLEM})


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Scripted:
    """A running server. The last answer is repeated."""

    url: str
    requests: list[Request]


@contextmanager
def scripted_daemon(answers: Sequence[Answer]) -> Iterator[Scripted]:
    """A server on a free port of this machine, gone when the block ends."""
    requests: list[Request] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _reply(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            requests.append(Request(self.command, self.path, headers, body))
            given = answers[min(len(requests), len(answers)) - 1]
            if not given.status:
                self.close_connection = True
                return
            self.send_response(given.status)
            for name, value in given.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(given.body)))
            self.end_headers()
            self.wfile.write(given.body)

        do_GET = do_PUT = do_POST = do_PATCH = do_DELETE = _reply  # noqa: N815

        def log_message(self, *_: object) -> None:
            """Silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="scripted daemon")
    thread.start()
    try:
        yield Scripted(f"http://127.0.0.1:{server.server_address[1]}", requests)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def scripted_client(*answers: Answer, **options: Any) -> Iterator[tuple[DaemonClient, list[Request]]]:
    """A client of such a server, and the requests that it has made."""
    with scripted_daemon(answers) as daemon, closing(DaemonClient(daemon.url, **options)) as client:
        yield client, daemon.requests
