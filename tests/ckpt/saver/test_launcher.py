"""ckpt-run: what a killed trainer had handed over is committed, in a container whose PID 1 it is, and elsewhere.

CKPTD_KILLS=200 runs the kills so often.
"""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ckpt.saver.launcher import EXIT_SAVED
from ckptstore.reading.source import StoreSource
from ckptstore.reading.verify import verify
from ckptstore.stores import open_store
from tests.support.waiting import Lines, wait_until

ROOT = Path(__file__).parents[3]
LAUNCHER = [sys.executable, "-c", "from ckpt.saver.launcher import program; program()"]
TRAINER = [sys.executable, "-m", "tests.ckpt.saver.fitting_train"]
KILLS = int(os.environ.get("CKPTD_KILLS", "4"))


def environment(tmp_path: Path, bytes_per_s: float) -> dict[str, str]:
    (tmp_path / "tmp").mkdir(exist_ok=True)
    path = f"{ROOT / 'tests/support/slow_disk'}:{ROOT / 'client'}"
    return {
        **os.environ, "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": path,
        "CKPTD_TEST_DISK_BYTES_PER_S": str(bytes_per_s),
    }  # fmt: skip


class Printing(subprocess.Popen[str]):
    def __init__(self, command: Sequence[str], **options: Any) -> None:
        super().__init__(command, text=True, stdout=subprocess.PIPE, **options)
        self.lines = Lines(self.stdout)

    def close(self) -> None:
        assert self.stdout is not None
        self.stdout.close()


@contextmanager
def container(command: Sequence[str], tmp_path: Path, bytes_per_s: float = float("inf")) -> Iterator[Printing]:
    """The command as PID 1 of a PID namespace; skips the test where that is not permitted."""
    unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    allowed = subprocess.run([*unshare, "true"], capture_output=True, check=False)
    if allowed.returncode:
        pytest.skip(f"may not make a PID namespace here: {allowed.stderr.decode().strip()}")
    with (tmp_path / "stderr").open("w") as stderr:
        process = Printing(
            [*unshare, *command], cwd=ROOT, env=environment(tmp_path, bytes_per_s),
            stderr=stderr, start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.close()


@contextmanager
def group(command: Sequence[str], tmp_path: Path, bytes_per_s: float = float("inf")) -> Iterator[Printing]:
    """The command as a process group of its own. Ends when the savers have, which have groups of their own."""
    variables = environment(tmp_path, bytes_per_s)
    with (tmp_path / "stderr").open("w") as stderr:
        process = Printing(command, cwd=ROOT, env=variables, stderr=stderr, start_new_session=True)
    saver = int(wait_for_line(process, "saver")[1])
    pidfd = os.pidfd_open(saver)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.close()
        ended, _, _ = select.select([pidfd], [], [], 100)
        os.close(pidfd)
        assert ended, "the saver has not ended"


def wait_for_line(process: Printing, *expected: str) -> list[str]:
    """The words of the next line that begins with these."""
    while line := process.lines.next():
        words = line.split()
        if words[: len(expected)] == [*expected]:
            return words
    raise AssertionError(f"the trainer ended before it said {expected!r}")


def trainer_in(process: Printing, launched: bool) -> int:
    """Process id of the trainer, out here: unshare's child, or the child of ckpt-run."""
    (pid,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    if launched:
        pid = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0]
    return int(pid)


@dataclass(frozen=True)
class Kill:
    """How a trainer is killed whose first save is durable, right after its saver has accepted more."""

    where: str
    """launched: in a container, with ckpt-run as PID 1. bare: there, as PID 1. group: with ckpt-run, as a group."""
    grace_s: float
    megabytes: int
    saves: int
    bytes_per_s: float
    delay_s: float

    @classmethod
    def of(cls, seed: int) -> Kill:
        chance = random.Random(seed)
        where, enough = (("launched", True), ("group", True), ("launched", False), ("bare", False))[seed % 4]
        if not enough:  # two seconds of upload
            return cls(where, 0.2, 4, 1, 2e6, chance.random() / 5)
        delay_s = chance.choice([0.0, chance.random()])
        return cls(where, 60.0, 2, chance.randint(1, 3), chance.choice([5e6, 20e6, 1e9]), delay_s)

    def command(self, store: Path) -> list[str]:
        trainer = [*TRAINER, str(store), str(self.megabytes), str(self.saves), str(self.grace_s)]
        return trainer if self.where == "bare" else [*LAUNCHER, "--grace", str(self.grace_s), "--", *trainer]


@pytest.mark.parametrize("seed", range(KILLS))
def test_a_kill_loses_no_accepted_save_for_which_there_is_time(seed: int, tmp_path: Path) -> None:
    """Also before its saver has begun to read, and while another save is under way. Without time nothing is torn."""
    kill = Kill.of(seed)
    run = group if kill.where == "group" else container
    with run(kill.command(tmp_path / "store"), tmp_path, kill.bytes_per_s) as process:
        choice = wait_for_line(process, "fits")[1]
        wait_for_line(process, "accepted", str(kill.saves + 1))
        time.sleep(kill.delay_s)
        if kill.where == "group":
            os.killpg(process.pid, signal.SIGKILL)
        else:
            os.kill(trainer_in(process, kill.where == "launched"), signal.SIGKILL)
        code = process.wait(100)
    said, source = (tmp_path / "stderr").read_text(), StoreSource(open_store(str(tmp_path / "store")))
    found = source.checkpoints("r")
    assert all(verify(source, checkpoint).ok for checkpoint in found), "nothing is torn"
    steps, enough = [checkpoint.step for checkpoint in found], kill.grace_s > 1
    assert choice == ("save" if enough else "finish")
    assert steps == [*range(kill.saves + 1, 0, -1)] if enough else steps[-1] == 1, said
    assert ("ckpt-run -- torchrun" in said) == (kill.where == "bare")
    assert ("are not done after" in said) == (kill.where == "launched" and not enough), said
    if kill.where != "bare":
        assert code == (-signal.SIGKILL if kill.where == "group" else 128 + signal.SIGKILL)


def test_ranks_that_outlive_the_command_may_go_on_saving(tmp_path: Path) -> None:
    """torchrun may be killed before its ranks: they and their savers would end with PID 1."""
    command = [
        *LAUNCHER, "--grace", "60", "--", "sh", "-c", '"$0" "$@" & wait', *TRAINER, str(tmp_path / "store"), "1", "1",
    ]  # fmt: skip
    with container(command, tmp_path) as process:
        wait_for_line(process, "accepted", "1")
        os.kill(trainer_in(process, launched=True), signal.SIGKILL)
        said = tmp_path / "stderr"
        wait_until(lambda: "the trainer has ended" in said.read_text(), "the launcher waits")
        wait_until(lambda: bool(StoreSource(open_store(str(tmp_path / "store"))).checkpoints("r")), "the commit")
        (note,) = (tmp_path / "tmp").glob("*/*.note")
        wait_until(
            lambda: '"uploading":0,"read":1,"waiting":0' in note.read_text(errors="replace"), "the saver is idle"
        )
        time.sleep(0.5)  # it looks ten times a second
        assert process.poll() is None
        os.kill(trainer_in(process, launched=True), signal.SIGKILL)
        assert process.wait(100) == 128 + signal.SIGKILL
    assert "all saves are durable" in said.read_text()


def test_a_trainer_that_cannot_be_started_again_leaves_its_savers_their_time(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text('#!/bin/sh\nrm "$0"\nexec "$@"\n')
    script.chmod(0o755)
    trainer = [str(script), *TRAINER, str(tmp_path / "store"), "2", "1", "60"]
    with container([*LAUNCHER, "--restarts", "1", "--grace", "60", "--", *trainer], tmp_path, 2e6) as process:
        wait_for_line(process, "accepted", "2")
        os.kill(trainer_in(process, launched=True), signal.SIGKILL)
        assert process.wait(100) == 127
    source = StoreSource(open_store(str(tmp_path / "store")))
    assert [checkpoint.step for checkpoint in source.checkpoints("r")] == [2, 1], (tmp_path / "stderr").read_text()


def launch(*command: str, grace: str = "30", options: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LAUNCHER, "--grace", grace, *options, "--", *command],
        cwd=ROOT, text=True, capture_output=True, timeout=100, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 0", 0), ("exit 42", 42), ("kill -TERM $$", 143), ("kill -KILL $$", 137), ("kill -PIPE $$", 141)],
)
def test_the_exit_code_is_that_of_the_trainer(script: str, code: int) -> None:
    """SIGPIPE too, which Python ignores: the trainer's shell scripts and tools do not expect that."""
    assert launch("sh", "-c", script).returncode == code


@pytest.mark.parametrize(
    ("code", "restarts", "starts"), [(7, 2, 3), (7, 0, 1), (0, 2, 1), (EXIT_SAVED, 2, 1), (137, 1, 2)]
)
def test_a_trainer_that_fails_starts_again(code: int, restarts: int, starts: int, tmp_path: Path) -> None:
    script = f"echo >> {tmp_path}/starts; " + ("kill -KILL $$" if code == 137 else f"exit {code}")
    ended = launch("sh", "-c", script, options=["--restarts", str(restarts)])
    assert (ended.returncode, len((tmp_path / "starts").read_text())) == (code, starts)


def test_a_trainer_that_got_a_signal_does_not_start_again() -> None:
    with shell("trap 'exit 7' TERM; echo ready; while :; do sleep 0.05; done", "--restarts", "5") as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 7


def test_a_parent_that_ignores_the_end_of_children_does_not_hang_it() -> None:
    script = "from signal import *; import os, sys; signal(SIGCHLD, SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", script, *LAUNCHER, "--", "sh", "-c", "exit 42"]
    assert subprocess.run(command, cwd=ROOT, timeout=100, check=False).returncode == 42


def test_a_trainer_that_cannot_be_started(tmp_path: Path) -> None:
    missing = launch("no-such-trainer")
    assert (missing.returncode, "not found" in missing.stderr) == (127, True)
    (tmp_path / "file").touch()
    assert launch(str(tmp_path / "file")).returncode == 126
    assert subprocess.run(LAUNCHER, cwd=ROOT, capture_output=True, check=False).returncode == 2


@contextmanager
def shell(script: str, *options: str) -> Iterator[tuple[Printing, Path]]:
    """A shell as the trainer, which has said "ready": ckpt-run, and the file that lists its children."""
    process = Printing(
        [*LAUNCHER, *options, "--", "sh", "-c", script], cwd=ROOT, env={**os.environ, "OPENBLAS_NUM_THREADS": "2"}
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    try:
        assert process.lines.next() == "ready\n"
        yield process, children
    finally:
        for pid in [*map(int, children.read_text().split() if process.poll() is None else []), process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        process.close()


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_signals_reach_the_trainer_and_orphans_are_reaped(sent: signal.Signals) -> None:
    name = sent.name.removeprefix("SIG")
    script = f"trap 'echo got; exit 7' {name}; (sleep 0 & ); echo ready; while :; do sleep 0.05; done"
    with shell(script) as (process, children):
        wait_until(lambda: len(children.read_text().split()) == 1, "the orphan is reaped")
        process.send_signal(sent)
        assert (process.lines.next(), process.wait(60)) == ("got\n", 7)


def test_signals_reach_the_trainer_while_orphans_are_reaped() -> None:
    """No other thread of ckpt-run takes a signal for which its first one does not wait just now."""
    with shell("trap 'echo got' USR1; trap 'exit 7' TERM; echo ready; while :; do (true & ); done") as (process, _):
        for _ in range(100):
            process.send_signal(signal.SIGUSR1)
            assert process.lines.next() == "got\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 7
