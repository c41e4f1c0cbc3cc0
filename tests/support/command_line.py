"""Running ckptctl: in this process for the many small cases, as a program, and at a terminal."""

from __future__ import annotations

import functools
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from ckpt.saver.launcher import parser
from ckptctl.cli import app
from ckptd.commands import cli
from tests.support import forking
from tests.support.forking import COMMAND_LINE, DAEMON, Fork, fork
from tests.support.waiting import Lines, wait_until

PROGRAM = (sys.executable, "-m", "ckptctl")
_OWN = ("CKPTD_URL", "CKPT_STORE", "CKPT_TOKEN", "CKPTCTL_PROFILE", "COLUMNS", "NO_COLOR", "FORCE_COLOR")
_DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True)
class Finished:
    """How a call ended and what it printed."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)

    @property
    def error(self) -> Any:
        """Standard error as the JSON object of an error."""
        return json.loads(self.stderr)


@functools.cache
def _command() -> Any:
    return get_command(app)  # once: it costs more than most commands


def invoke(*args: object, env: Mapping[str, str] | None = None) -> Finished:
    """Run ckptctl in this process."""
    command = _command()
    with CliRunner().isolation(env={**dict.fromkeys(_OWN), **(env or {})}) as (stdout, stderr, _):
        with pytest.raises(SystemExit) as ended:
            command.main([str(arg) for arg in args], prog_name="ckptctl")
        sys.stdout.flush()
        sys.stderr.flush()
        code = ended.value.code
        assert isinstance(code, int)
        return Finished(code, stdout.getvalue().decode(), stderr.getvalue().decode())


def succeed(*args: object) -> Finished:
    """The same, of a command whose exit code must be 0."""
    done = invoke(*args)
    assert done.code == 0, done.stdout + done.stderr
    return done


def run(*args: object, env: Mapping[str, str] | None = None) -> Finished:
    """Run ckptctl in a process of its own without a terminal, a fork: see tests.support.forking."""
    host = DAEMON if any("s3://" in str(arg) for arg in args) else COMMAND_LINE  # which has imported s3fs
    return Finished(*forking.run(host, "ckptctl", [str(arg) for arg in args], environment=clean_environment(env)))


def run_program(*args: object, env: Mapping[str, str] | None = None) -> Finished:
    """The same in a new interpreter."""
    done = subprocess.run(
        [*PROGRAM, *map(str, args)], env=clean_environment(env), stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=_DEADLINE_S,
    )  # fmt: skip
    return Finished(done.returncode, done.stdout, done.stderr)


def clean_environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without what ckptctl reads from it, and with `env`."""
    return {**{name: value for name, value in os.environ.items() if name not in _OWN}, **(env or {})}


@contextmanager
def started(*args: object) -> Iterator[tuple[Fork, Lines]]:
    """ckptctl as a fork, killed at the end if it still runs, and the lines that it prints."""
    reader, writer = os.pipe()
    arguments = [str(arg) for arg in args]
    process = fork(COMMAND_LINE, "ckptctl", arguments, stdout=writer, stderr=2, environment=clean_environment())
    os.close(writer)
    try:
        with open(reader) as pipe:
            yield process, Lines(pipe)
    finally:
        process.kill()
        process.wait(_DEADLINE_S)


class Terminal:
    """ckptctl at a terminal of its own, a fork. A context manager: what still runs at the end is killed."""

    def __init__(self, *args: object, columns: int = 80) -> None:
        self.screen = ""
        self._master, slave = pty.openpty()
        self._process = fork(
            COMMAND_LINE, "tests.support.terminal", [*map(str, args)], stdout=slave, stderr=slave, passed=[slave],
            environment=clean_environment({"COLUMNS": str(columns), "TERM": "xterm"}),
        )  # fmt: skip
        os.close(slave)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        os.close(self._master)

    def wait_for(self, text: str) -> None:
        while text not in self.screen:
            assert self._read(), f"{text!r} never came:\n{self.screen}"

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def interrupt(self) -> None:
        """Ctrl-C, once it waits for input. Python only learns of one that comes just before when it has read."""
        stat = Path(f"/proc/{self._process.pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "S", "a wait for input")
        os.kill(self._process.pid, signal.SIGINT)

    def finish(self) -> int:
        """Read to the end; returns the exit code."""
        while self._read():
            pass
        return self._process.wait(_DEADLINE_S)

    def _read(self) -> bool:
        deadline = time.monotonic() + _DEADLINE_S
        while time.monotonic() < deadline:
            if not select.select([self._master], [], [], 0.1)[0]:
                continue
            try:
                data = os.read(self._master, 65536)
            except OSError:  # EIO: the other side is closed
                return False
            self.screen += data.decode(errors="replace")
            return bool(data)
        raise AssertionError(f"nothing came for {_DEADLINE_S} s:\n{self.screen}")


def check_command(words: Sequence[str]) -> None:
    """Fail if the program does not know a word or an option. Nothing runs; other programs are not checked."""
    match words[0]:
        case "ckptctl":
            _check(typer.main.get_command(app), words)
        case "ckptd":
            _check(typer.main.get_command(cli), words)
        case "ckpt-run":
            check_command(parser().parse_args([*words[1:]]).command)


def _check(command: Any, words: Sequence[str], parent: Any = None) -> None:
    context = command.make_context(words[0], [*words[1:]], parent=parent)
    rest = [*context._protected_args, *context.args] if hasattr(command, "resolve_command") else []
    if rest:
        name, found, others = command.resolve_command(context, rest)
        _check(found, [name, *others], context)
