"""Real daemons: `python -m ckptd serve` on a free port of this machine, stopped with SIGTERM."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from ckptapi.bodies import RestoreBody, RestoreRequest
from ckptapi.client import DaemonClient
from ckptstore.stores import Store
from tests.support.forking import DAEMON, Fork, fork
from tests.support.stores import serving
from tests.support.waiting import wait_until

_EXIT_S = 60.0
_LISTENING = "listening on "
# Tests wait for the daemon to notice things: let it look often, and leave nothing waiting at its end.
_EAGER = ("--poll-seconds", "0.1", "--commit-grace-seconds", "0.3", "--notice-seconds", "0")
_OPEN = ("--auth", "off")


@dataclass(frozen=True, slots=True)
class Daemon:
    url: str
    process: subprocess.Popen[bytes] | Fork
    log_path: Path

    def log(self) -> str:
        """What it wrote to stderr so far."""
        return self.log_path.read_text(errors="replace")

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, **options)

    def post(self, path: str, body: object = None, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, **options)

    def metric(self, name: str) -> float:
        """The value of a series without labels; 0 before it exists."""
        lines = self.get("/metrics").text.splitlines()
        return next((float(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0.0)

    def waiting_requests(self) -> int:
        return round(self.metric("ckptd_waiting_requests"))

    def latest_step(self, run: str = "gpt") -> int:
        """Of the newest checkpoint that it knows; -1 if there is none."""
        return int(self.get(f"/v1/checkpoints/latest?run={run}").json().get("step", -1))

    def peak_kib(self) -> int:
        """The most memory that it has had so far."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])

    @contextmanager
    def client(self, token: str | None = None) -> Iterator[DaemonClient]:
        """The project's own client, closed at the end."""
        client = DaemonClient(self.url, token)
        try:
            yield client
        finally:
            client.close()

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        self.process.kill()
        self.process.wait(_EXIT_S)

    def stop(self) -> int:
        """SIGTERM; returns the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(_EXIT_S)


@contextmanager
def running_daemon(
    store_url: str,
    db_url: str | None = None,
    *,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    ready: bool = True,
    program: Sequence[str] = ("-m", "ckptd", "serve"),
) -> Iterator[Daemon]:
    """A daemon for the store, ready when the block begins (ready=False: only listening), gone when it ends.

    It asks for no token, unless the environment has CKPTD_TOKEN or the options say otherwise.
    db_url: None for an index that lives as long as the block. options: more arguments of `serve`.
    environment: instead of this process's own. program: another one with the same options, and how Python runs it.
    """
    with tempfile.TemporaryDirectory() as folder:
        log_path, db_url = Path(folder) / "log", db_url or f"sqlite:///{folder}/index.db"
        arguments = [
            "--store", store_url, "--db", db_url, "--cache", f"{folder}/cache", "--port", "0", *_EAGER,
            *(() if "CKPTD_TOKEN" in (environment or {}) else _OPEN), *options,
        ]  # fmt: skip
        inherited = os.environ if environment is None else environment
        clean = {**_others(inherited), **_settings(environment or {})}
        if ready and (path := store_url.removeprefix("file://")).startswith("/"):
            Path(path).mkdir(parents=True, exist_ok=True)  # before it polls: without, it is not ready
        with log_path.open("wb") as log:
            process = _start(program, arguments, log.fileno(), clean)
        try:
            daemon = Daemon(_wait_for_url(process, log_path), process, log_path)
            if ready:
                wait_until(lambda: _is_ready(daemon), "the daemon's readiness")
            yield daemon
        finally:
            _end(process)


def _start(
    program: Sequence[str], arguments: Sequence[str], log: int, environment: Mapping[str, str]
) -> subprocess.Popen[bytes] | Fork:
    """A fork, unless the environment has more for it than settings: modules read theirs when they are imported."""
    if _read_early(environment) != _read_early(os.environ):
        return subprocess.Popen([sys.executable, *program, *arguments], stderr=log, env=environment)
    flag, module, *first = program
    assert flag == "-m"
    return fork(DAEMON, module, [*first, *arguments], stdout=1, stderr=log, environment=environment)


def _read_early(environment: Mapping[str, str]) -> dict[str, str]:
    """What modules may read when they are imported."""
    return {name: value for name, value in environment.items() if not name.startswith(("CKPTD_", "AWS_", "FSSPEC_"))}


def _settings(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith("CKPTD_")}


def _others(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith("CKPTD_")}


def _wait_for_url(process: subprocess.Popen[bytes] | Fork, log_path: Path) -> str:
    def said() -> bool:
        assert process.poll() is None, f"the daemon ended with {process.returncode}:\n{log_path.read_text()}"
        return _LISTENING in log_path.read_text() and log_path.read_text().endswith("\n")

    wait_until(said, "the daemon's start")
    found = re.search(_LISTENING + r'(https?://[^\s"]+)', log_path.read_text())
    assert found is not None, log_path.read_text()
    return found[1]


def _is_ready(daemon: Daemon) -> bool:
    try:
        return daemon.get("/readyz").status_code == 200
    except httpx.TransportError as error:
        raise AssertionError(f"{error!r}; the daemon ended with {daemon.process.poll()}:\n{daemon.log()}") from error


def _end(process: subprocess.Popen[bytes] | Fork) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_EXIT_S)
            raise


def join(client: DaemonClient, run: str, key: str, world_size: int, rank: int, **options: Any) -> RestoreBody:
    """Join a restore session as a rank."""
    return client.join_restore(RestoreRequest(run=run, key=key, world_size=world_size, rank=rank, **options))


@contextmanager
def caching_daemon(store: Store, folder: Path) -> Iterator[str]:
    """The address of a daemon that reads through this store, in this process. Its index and cache are in the folder."""
    from ckptd.app import create_app
    from ckptd.settings import Settings

    index, cache = f"sqlite:///{folder / 'index.db'}", str(folder / "cache")
    settings = Settings(store=store.url, auth="off", db=index, cache=cache, poll_seconds=0.1)
    with serving(create_app(settings, store)) as url:
        wait_until(lambda: httpx.get(f"{url}/readyz").status_code == 200, "readiness")
        yield url
