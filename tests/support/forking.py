"""Real processes that start at once: forks of a host that has imported what they need.

    python -m tests.support.forking <socket> <module>...

A daemon takes a second to import itself, and a trainer, with torch, three; hundreds of tests start one. A fork runs a
module as `python -m` does: with arguments, environment and output of its own, as a process of its own that is killed,
signalled and waited for like any other. What must begin with a bare interpreter (command lines, installations) uses
subprocess. The host of a framework on torch is a fork of the host of trainers, and the hosts
of pytest-xdist's workers are forks of the controller's hosts.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
DAEMON = (
    "ckptd.app", "ckptd.settings", "ckptd.server", "ckptd.commands", "psycopg", "s3fs", "typer",
    "sqlalchemy.dialects.sqlite", "uvicorn.lifespan.on", "uvicorn.loops.asyncio",
)  # fmt: skip
COMMAND_LINE = (
    "ckptctl.cli", "ckptctl.session", "ckptctl.render", "ckptctl.commands.listing", "ckptctl.commands.prune",
    "ckptapi.client", "ckptstore.stores.local", "rich.progress",
)  # fmt: skip
TRAINER = (
    "ckpt.checkpointer", "ckpt.capture.state", "ckpt.restoring.objects", "ckpt.restoring.sharing",
    "ckpt.snapshot.overlap", "tests.support.training", "tests.support.parallel.matrix", "tests.ckpt.ddp",
    "torch._dynamo",
)  # fmt: skip
_REQUEST_BYTES = 1 << 20
_END_S = 120.0


controllers: list[str] = []
"""In a worker of pytest-xdist: the address of share_hosts."""


class Fork:
    """A running fork, in the way of subprocess.Popen. Only its creator may wait for it."""

    def __init__(self, host: Host, pid: int, descriptor: int) -> None:
        """pid: as the host sees it, which may be in another PID namespace. descriptor: its pidfd, which this owns."""
        self.pid = pid
        self.returncode: int | None = None
        self._host = host
        self._descriptor = descriptor

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        """The same when it has ended. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        """If it has not ended."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._descriptor, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._descriptor], [], [], timeout)[0]:
            try:
                self.returncode, _ = self._host.ask({"reap": self.pid})
            except ConnectionError:  # the host was killed, and this with it
                self.returncode = -signal.SIGKILL
            os.close(self._descriptor)
        return self.returncode


@dataclass
class Host:
    """The process that forks, from the side of the tests."""

    connection: socket.socket
    process: subprocess.Popen[bytes] | Fork | None
    """None: the controller's."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fork(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        stdout: int,
        stderr: int,
        environment: Mapping[str, str] | None = None,
        strict: bool = False,
        passed: Sequence[int] = (),
    ) -> Fork:
        """Run a module as the main program of a fork; see the function `fork`."""
        request = {"module": module, "arguments": list(arguments), "strict": strict}
        request["environment"] = dict(os.environ if environment is None else environment)
        pid, [descriptor] = self.ask(request, stdout, stderr, *passed)
        return Fork(self, pid, descriptor)

    def ask(self, request: dict[str, Any], *descriptors: int) -> tuple[int, list[int]]:
        """One request; a number, and descriptors."""
        with self.lock:
            socket.send_fds(self.connection, [json.dumps(request).encode()], descriptors)
            return self.answer()

    def answer(self) -> tuple[int, list[int]]:
        """The next answer of the host. Raises ConnectionError if it is gone."""
        answer, received, _, _ = socket.recv_fds(self.connection, _REQUEST_BYTES, 1)
        if not answer:
            raise ConnectionResetError("the host of forks is gone")
        return int(answer), received

    def close(self) -> None:
        """End it, and what it has forked."""
        self.connection.shutdown(socket.SHUT_WR)
        self.connection.recv(1)  # until it has ended
        self.connection.close()
        if self.process is not None:
            self.process.wait()


def fork(imports: Sequence[str], module: str, arguments: Sequence[str], **options: Any) -> Fork:
    """Run a module as the main program of a fork that has `imports` already; strict: warnings are errors.

    imports: modules, after variables of the environment that they read: `NAME=VALUE`. passed: descriptors that the
    fork gets too; their numbers there are its first arguments. Options: those of Host.fork.
    """
    return host(tuple(imports)).fork(module, arguments, **options)


def run(
    imports: Sequence[str], module: str, arguments: Sequence[str], *, end_s: float = _END_S, **options: Any
) -> tuple[int, str, str]:
    """The same to its end, for `end_s` at most: exit status, standard output and standard error."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        started = fork(imports, module, arguments, stdout=stdout.fileno(), stderr=stderr.fileno(), **options)
        try:
            code = started.wait(end_s)
        finally:
            started.kill()
            started.wait()
        for output in (stdout, stderr):
            output.seek(0)
        return code, stdout.read(), stderr.read()


@functools.cache
def host(imports: tuple[str, ...]) -> Host:
    """One for each test process and set of imports; it ends when that process does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # A process with threads must not be forked.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with theirs:
        descriptor = theirs.fileno()
        process: subprocess.Popen[bytes] | Fork | None = None
        if controllers:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as controller:
                controller.connect(controllers[0])
                socket.send_fds(controller, [json.dumps(imports).encode()], [descriptor])
        elif "torch._dynamo" in imports and imports != TRAINER:
            process = fork(TRAINER, __name__, imports, stdout=1, stderr=2, environment=environment, passed=[descriptor])
        else:
            command = [sys.executable, "-m", __name__, str(descriptor), *imports]
            process = subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=[descriptor])
    host = Host(ours, process)
    atexit.register(host.close)
    return host


@functools.cache
def share_hosts() -> str:
    """In the controller: forks of its hosts for its workers, on a thread. Returns the address, for `controllers`."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address := f"\0ckpt-tests-{os.getpid()}")  # in no folder
    listener.listen()
    threading.Thread(target=_share, args=(listener,), name="hosts", daemon=True).start()
    return address


def _share(listener: socket.socket) -> None:
    while True:
        worker, _ = listener.accept()
        data, [descriptor], _, _ = socket.recv_fds(worker, _REQUEST_BYTES, 1)
        worker.close()
        fork(tuple(json.loads(data)), __name__, [], stdout=1, stderr=2, passed=[descriptor])
        os.close(descriptor)


def main(descriptor: int, imports: Sequence[str]) -> None:
    """Fork whenever asked to; in a fork, run what was asked for."""
    for name in imports:
        variable, is_one, value = name.partition("=")
        if is_one:
            os.environ[variable] = value
        else:
            importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not be forked"
    gc.freeze()  # else the first collection of each fork copies every page that it shares with the others
    task = _serve(socket.socket(fileno=descriptor))
    if task is None:
        _end(0)
    elif task["module"] == "tests.support.forking":
        main(int(task["arguments"][0]), task["arguments"][1:])
    else:
        _run(task["module"], task["arguments"])


def _run(module: str, arguments: Sequence[str]) -> None:
    """A module to its end. An exception, or a SystemExit with a text, ends the interpreter in its own way."""
    sys.argv = ["", *arguments]
    code: Any = None
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
        if not isinstance(code, int | None):
            raise
    _end((code or 0) & 0xFF)


def _end(code: int) -> NoReturn:
    """As an interpreter ends: threads, handlers, and what nothing refers to any more.

    Imported modules stay as they are: taking torch down takes 0.4 s of a core, more than most programs of tests do.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    gc.collect()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _serve(connection: socket.socket) -> dict[str, Any] | None:
    """In the host: None, when the parent has ended. In a fork: what it was asked to do."""
    running: set[int] = set()
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, _REQUEST_BYTES, 3)
        if not data:
            break
        request: dict[str, Any] = json.loads(data)
        if "reap" in request:
            _, status = os.waitpid(request["reap"], 0)
            running.remove(request["reap"])
            connection.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if pid == 0:
            connection.close()
            _become(request, descriptors[:2])
            return request | {"arguments": [*map(str, descriptors[2:]), *request["arguments"]]}
        for number in descriptors:
            os.close(number)
        running.add(pid)
        descriptor = os.pidfd_open(pid)
        socket.send_fds(connection, [str(pid).encode()], [descriptor])
        os.close(descriptor)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    return None


def _become(request: dict[str, Any], descriptors: Sequence[int]) -> None:
    for number, target in zip(descriptors, (1, 2), strict=True):
        os.dup2(number, target)
        os.close(number)
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # which an import may have asked for
    if "fsspec.config" in sys.modules:  # which has read FSSPEC_... when the host imported it
        config = sys.modules["fsspec.config"]
        config.set_conf_env(config.conf)
    if request["strict"]:
        warnings.simplefilter("error")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
