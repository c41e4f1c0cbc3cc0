"""A Ray cluster of this host; the test is skipped if Ray is not installed, which `pip install 'ckptd[ray]'` does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.ports import free_port
from tests.support.waiting import wait_until


@contextmanager
def running_ray(workers: int, folder: Path) -> Iterator[str]:
    """Its address as an engine. folder: for its sockets, so of a short name."""
    pytest.importorskip("ray")
    port = free_port()
    options = {
        "node-ip-address": "127.0.0.1",
        "port": free_port(),
        "ray-client-server-port": port,
        "min-worker-port": 0,  # any; the range that Ray takes has the others
        "max-worker-port": 0,
        "num-cpus": workers,
        "object-store-memory": 100_000_000,
        "include-dashboard": "false",
        "temp-dir": folder,
    }
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    # With gRPC's handlers of forks the first server for a client often dies at once.
    env = {**os.environ, "GRPC_ENABLE_FORK_SUPPORT": "0"}
    with subprocess.Popen([*start, *(f"--{name}={value}" for name, value in options.items())], env=env) as head:
        try:
            wait_until(lambda: _listens(port), "Ray listens")
            yield f"ray://127.0.0.1:{port}"
        finally:
            head.terminate()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
