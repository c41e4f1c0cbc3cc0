"""Clients that connect and send no request cannot stop the daemon."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from ckptd.http.connections import ConnectionLimits, LimitedListener
from ckptd.metrics import Metrics
from tests.support.daemons import Daemon, running_daemon
from tests.support.waiting import wait_until

_HALF_A_REQUEST = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Half: "
_SHORT = ("--header-timeout-seconds", "1")


@contextmanager
def silent_connections(daemon: Daemon, count: int, source: str = "127.0.0.1") -> Iterator[list[socket.socket]]:
    """Connections of which every other one sends half a request, and the others nothing."""
    found = urlsplit(daemon.url)
    with ExitStack() as stack:
        connections = []
        for number in range(count):
            connection = socket.create_connection((found.hostname, found.port), timeout=60, source_address=(source, 0))
            stack.enter_context(connection)
            if number % 2:
                with suppress(ConnectionError):  # it is closed already: there are too many
                    connection.sendall(_HALF_A_REQUEST)
            connections.append(connection)
        yield connections


def num_descriptors(daemon: Daemon) -> int:
    return len(list(Path(f"/proc/{daemon.process.pid}/fd").iterdir()))


def is_alive(daemon: Daemon) -> bool:
    try:
        return daemon.get("/livez", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def closed_by(daemon: Daemon, reason: str) -> bool:
    return f'ckptd_connections_closed_total{{reason="{reason}"}}' in daemon.get("/metrics").text


@pytest.mark.timeout(180)
@pytest.mark.parametrize("per_client", ["0", "100"])
def test_silent_connections_leave_descriptors_and_end(tmp_path: Path, per_client: str) -> None:
    options = (*_SHORT, "--connections-per-client", per_client)
    with running_daemon(f"file://{tmp_path}/store", options=options) as daemon:
        before = num_descriptors(daemon)
        resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (256, 256))
        with silent_connections(daemon, 400) as connections:
            assert num_descriptors(daemon) < 256  # some of the reserve may be in use
            wait_until(lambda: is_alive(daemon), "an answer")
            wait_until(lambda: all(map(is_closed, connections)), "the end of the silent connections")
            wait_until(lambda: num_descriptors(daemon) <= before + 32, "the release of their descriptors")
            assert closed_by(daemon, "header_timeout")
            assert closed_by(daemon, "silent")
        assert "Too many open files" not in daemon.log()


@pytest.mark.parametrize("per_client", ["0", "256"])
def test_silent_connections_of_one_address_stop_no_other_one(tmp_path: Path, per_client: str) -> None:
    """They time out after an hour here, so that an answer means that the daemon closed some of them."""
    options = ("--header-timeout-seconds", "3600", "--connections-per-client", per_client)
    with running_daemon(f"file://{tmp_path}/store", options=options) as daemon, ExitStack() as stack:
        resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (256, 256))
        for _ in range(4):
            stack.enter_context(silent_connections(daemon, 100, "127.0.0.2"))
            for _ in range(5):
                assert daemon.get("/livez", timeout=30).status_code == 200
        assert "Too many open files" not in daemon.log()


@pytest.mark.parametrize(
    ("first", "status", "rest"),
    [
        (_HALF_A_REQUEST + b"x\r\n\r\n", b" 200 ", _HALF_A_REQUEST),
        (b"POST /nope HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n", b" 404 ", b"x"),
    ],
    ids=["half a request on a kept connection", "an endless body of a refused request"],
)
def test_what_is_never_completed_ends(tmp_path: Path, first: bytes, status: bytes, rest: bytes) -> None:
    """Of the refused request the response is complete, and each byte of the body ends uvicorn's own time-out."""
    with (
        running_daemon(f"file://{tmp_path}/store", options=_SHORT) as daemon,
        silent_connections(daemon, 1) as (connection,),
    ):
        connection.sendall(first)
        assert status in connection.recv(1 << 16)
        connection.sendall(rest)
        wait_until(lambda: is_closed(connection), "the end of the connection")


def test_a_request_that_waits_longer_than_the_time_out_is_answered(tmp_path: Path) -> None:
    with running_daemon(f"file://{tmp_path}/store", options=("--header-timeout-seconds", "1")) as daemon:
        assert daemon.get("/v1/checkpoints/latest?run=none&wait=3").json()["code"] == "no_checkpoint"


def test_connections_per_client_are_released(tmp_path: Path) -> None:
    with running_daemon(f"file://{tmp_path}/store", options=("--connections-per-client", "3")) as daemon:
        for _ in range(3):
            with silent_connections(daemon, 5) as connections:
                wait_until(lambda: sum(map(is_closed, connections)) >= 2, "the end of two")
                assert not all(map(is_closed, connections))
            wait_until(lambda: is_alive(daemon), "an answer")


def test_a_connection_waits_until_evicted_ones_are_closed() -> None:
    """A burst of silent connections comes within one turn of the event loop: who comes after them is not refused."""
    limits = ConnectionLimits(1, 60.0, Metrics())
    with ExitStack() as stack:
        bound = socket.create_server(("127.0.0.1", 0), backlog=64)
        listener = stack.enter_context(LimitedListener(bound.detach(), limits))
        for _ in range(18):
            stack.enter_context(socket.create_connection(listener.getsockname()))
        accepted = [stack.enter_context(listener.accept()[0]) for _ in range(17)]
        with pytest.raises(BlockingIOError):
            listener.accept()
        accepted[0].close()
        stack.enter_context(listener.accept()[0])
