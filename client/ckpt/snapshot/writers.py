"""How snapshots reach the pipeline: through a saver process, or in threads of this process.

A writer takes jobs from the training thread and gives reports from threads of its own.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ckpt.saver.lock import SaverLock
from ckpt.saver.messages import (
    Abort,
    Channel,
    Command,
    Cut,
    Forget,
    Report,
    SaveJob,
    Setup,
    Slot,
    Staged,
    Stop,
    Withdraw,
)
from ckpt.saver.pipeline import SavePipeline
from ckpt.saver.segment import Segment, close_after_fork
from ckptstore.errors import SaverDied
from ckptstore.names import Attempt
from ckptstore.stores import open_store

OnReport = Callable[[Report], None]
OnDeath = Callable[[SaverDied], None]

_SEND_TIMEOUT_S = 60.0
_STDERR_TAIL_CHARACTERS = 2000


class SaveWriter(Protocol):
    """Makes snapshots durable. Methods may be called from any thread."""

    def add_slot(self, number: int, segment: Segment) -> None:
        """Make a slot of the arena known, before the first job that uses it."""

    def forget_slot(self, number: int) -> None:
        """No further job uses this slot."""

    def submit(self, job: SaveJob) -> None:
        """Take a snapshot over. After return it becomes durable even if this process is killed (saver process)."""

    def staged(self, number: int, chunks: int) -> None:
        """So many chunks of a streamed job are in its slot, or were."""

    def cut(self, number: int) -> None:
        """No more chunks of a streamed job will come."""

    def withdraw(self, step: int) -> None:
        """Give up the oldest job whose upload has not begun, if there is one, in favour of a save of `step`."""

    def abort(self, attempt: Attempt, failure: str | None = None) -> None:
        """Tell other ranks that this one takes no part in an attempt. failure: because something went wrong."""

    def close(self, timeout_s: float | None) -> None:
        """Finish all jobs and end. Raises TimeoutError if that takes longer."""


class ThreadWriter:
    """The pipeline in threads of this process: for stores that live in it, and where no process may be started."""

    def __init__(self, setup: Setup, on_report: OnReport) -> None:
        self._pipeline = SavePipeline(open_store(setup.store, setup.options), setup, on_report)
        self._segments: dict[int, Segment] = {}

    def add_slot(self, number: int, segment: Segment) -> None:
        """Remember it."""
        self._segments[number] = segment

    def forget_slot(self, number: int) -> None:
        """Forget it."""
        del self._segments[number]

    def submit(self, job: SaveJob) -> None:
        """Hand over to the pipeline's threads."""
        raw = self._segments[job.slot].view if job.slot is not None else memoryview(b"")
        self._pipeline.submit(job, raw)

    def staged(self, number: int, chunks: int) -> None:
        """Tell the pipeline."""
        self._pipeline.staged(number, chunks)

    def cut(self, number: int) -> None:
        """Tell the pipeline."""
        self._pipeline.cut(number)

    def withdraw(self, step: int) -> None:
        """Done on return."""
        self._pipeline.withdraw(step)

    def abort(self, attempt: Attempt, failure: str | None = None) -> None:
        """Leave it to a thread."""
        self._pipeline.abort(attempt, failure)

    def close(self, timeout_s: float | None) -> None:
        """Wait for the threads."""
        closer = threading.Thread(target=self._pipeline.close, daemon=True)
        closer.start()
        closer.join(timeout_s)
        if closer.is_alive():
            raise TimeoutError(f"saves are not durable after {timeout_s} s")


class ProcessWriter:
    """A saver process, started by exec so that it shares nothing with the trainer but the arena and a socket."""

    def __init__(self, setup: Setup, on_report: OnReport, on_death: OnDeath) -> None:
        self._on_report = on_report
        self._on_death = on_death
        self._closing = False
        self._sending = threading.Lock()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - read when the saver dies
        ours, theirs = socket.socketpair()
        ours.settimeout(_SEND_TIMEOUT_S)
        with theirs:
            self._saver_lock = SaverLock(setup.store, setup.run)
            self._process = _start(theirs.fileno(), self._saver_lock.saver, self._stderr.fileno())
            self._saver_lock.inherited()
        self._channel = Channel(ours)
        close_after_fork(self._channel)
        self._listener = threading.Thread(target=self._listen, name="ckpt-reports", daemon=True)
        self._listener.start()
        self._send(setup)

    @property
    def pid(self) -> int:
        """The saver's process id."""
        return self._process.pid

    def add_slot(self, number: int, segment: Segment) -> None:
        """Send the descriptor."""
        self._send(Slot(number, segment.num_bytes), fds=[segment.fd])

    def forget_slot(self, number: int) -> None:
        """Have the saver unmap it."""
        self._send(Forget(number))

    def submit(self, job: SaveJob) -> None:
        """Send the job; it is in the kernel's hands on return."""
        self._send(job)

    def staged(self, number: int, chunks: int) -> None:
        """Send it; the chunks are in the saver's hands on return."""
        self._send(Staged(number, chunks))

    def cut(self, number: int) -> None:
        """Send it."""
        self._send(Cut(number))

    def withdraw(self, step: int) -> None:
        """Ask for it; a report says so when it is done."""
        self._send(Withdraw(step))

    def abort(self, attempt: Attempt, failure: str | None = None) -> None:
        """Ask for it."""
        self._send(Abort(attempt, failure))

    def close(self, timeout_s: float | None) -> None:
        """Ask the saver to finish, and wait for it."""
        self._closing = True
        self._send(Stop())
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"saves are not durable after {timeout_s} s; the saver goes on") from None
        self._listener.join()

    def _send(self, command: Command, fds: Sequence[int] = ()) -> None:
        try:
            with self._sending:
                self._channel.send(command, fds)
        except OSError:
            # Not reading for a minute is as good as dead. The listener sees the end and reports it.
            self._process.kill()

    def _listen(self) -> None:
        while (report := self._channel.receive(Report)) is not None:
            self._on_report(report)
        status = self._process.wait()
        error = None if self._closing and status == 0 else self._death_error(status)
        self._saver_lock.close()
        self._channel.close()
        self._stderr.close()
        if error is not None:
            self._on_death(error)

    def _death_error(self, status: int) -> SaverDied:
        cause = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        self._stderr.seek(0)
        stderr_tail = self._stderr.read()[-_STDERR_TAIL_CHARACTERS:].decode(errors="replace").strip()
        return SaverDied(
            f"the saver process {self._process.pid} {cause}" + (f", saying: {stderr_tail}" if stderr_tail else ""),
            "Saves that were under way are lost, committed checkpoints are not; the next save starts a new saver",
        )


def _start(sock: int, lock: int, stderr: int) -> subprocess.Popen[bytes]:
    # The saver imports from where the trainer imports, never from whatever folder it is started in.
    code = f"import sys; sys.path[:] = {json.dumps(sys.path)}; from ckpt.saver.process import run; run({sock}, {lock})"
    return subprocess.Popen(
        [sys.executable, "-P", "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        pass_fds=(sock, lock),
        start_new_session=True,
        env=_environment(os.environ),
    )


def _environment(inherited: Mapping[str, str]) -> dict[str, Any]:
    # Threads of numerical libraries would only compete with the training step.
    return {**inherited, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
