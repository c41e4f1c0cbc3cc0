"""Writers: run the save pipeline in a saver process, or in threads of this process.

The messages (ckpt.saver.messages) are their interface: `send` takes a command, from any thread of the trainer that
signals do not interrupt, and reports arrive on threads of the writer.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack

from ckpt.host.lock import SaverLock
from ckpt.host.segment import Segment, close_after_fork, no_fork
from ckpt.saver.launcher import warn_without_launcher
from ckpt.saver.messages import IGNORED, Channel, Command, Idle, Report, SaveJob, Setup, Stop
from ckpt.saver.presence import NewNote
from ckpt.saver.retained_snapshot import release
from ckptstore.errors import SaverDied
from ckptstore.format.shards import RawStream
from ckptstore.threads import Latch, start_daemon

OnReport = Callable[[Report], None]
OnDeath = Callable[[SaverDied], None]

_SEND_TIMEOUT_S = 60.0
_STDERR_TAIL_CHARACTERS = 2000


class ThreadWriter:
    """The pipeline in threads of this process: for in-process stores, and where no process can be started."""

    def __init__(self, setup: Setup, on_report: OnReport) -> None:
        from ckpt.saver.pipeline import SavePipeline, open_saved  # what only this writer runs here

        self._pipeline = SavePipeline(open_saved(setup), setup, on_report)
        self.ended = Latch()
        """All jobs are finished, after `stop`."""

    def send(self, command: Command, memory: Segment | RawStream | None = None) -> None:
        """Carry out a command. memory: that comes with it; also a state that is not in a slot, which is read until its
        job is released or has failed."""
        self._pipeline.carry_out(command, memory)

    def stop(self, retain_snapshot: bool) -> None:
        """Finish all jobs in the background, then set `ended`."""
        self._pipeline.heartbeats.stop(closed=True)
        start_daemon("ckpt-stop", self._end)

    def _end(self) -> None:
        try:
            self._pipeline.close()
        finally:
            self.ended.set()


class ProcessWriter:
    """A saver process, started by exec so that it shares only the arena and a socket with the trainer."""

    def __init__(self, setup: Setup, on_report: OnReport, on_death: OnDeath) -> None:
        self._on_report = on_report
        self._on_death = on_death
        self._closing = False
        self.ended = Latch()
        """The saver has ended, or does nothing more but keep memory."""
        self._sending = threading.Lock()
        warn_without_launcher()
        release(setup.home, setup.run, setup.rank)  # this trainer needs the memory for slots of its own
        with ExitStack() as started, no_fork:  # a child would hold the locks and sockets for life
            self._saver_lock = SaverLock(setup.home, setup.run)
            started.callback(self._saver_lock.close)
            self._stderr = started.enter_context(tempfile.TemporaryFile())  # read when the saver dies
            ours, theirs = socket.socketpair()
            ours.settimeout(_SEND_TIMEOUT_S)
            self._channel = Channel(ours)
            started.callback(self._channel.close)
            close_after_fork(self._channel, Channel.close_in_child)
            self._note = NewNote(setup)
            started.callback(self._note.close)
            with theirs:
                self._process = _start(theirs.fileno(), self._saver_lock.saver, self._note, self._stderr.fileno())
            self._saver_lock.inherited()
            self._note.inherited(self._process.pid)
            started.pop_all()  # the listener closes them
        start_daemon("ckpt-reports", self._listen)
        self.send(setup)

    @property
    def pid(self) -> int:
        """The saver's process id."""
        return self._process.pid

    def send(self, command: Command, memory: Segment | None = None) -> None:
        """Send a command to the saver, with a descriptor of the memory that comes with it.

        On return the message is in the socket's buffer, which outlives this process: a SaveJob becomes durable even if
        it is killed.
        """
        try:
            with self._sending:
                if isinstance(command, SaveJob):
                    self._note.sending()
                self._channel.send(command, [memory.fd] if memory is not None else ())
        except OSError:
            # A saver that has not read for a minute counts as dead. The listener sees it end and reports its death.
            self._process.kill()

    def stop(self, retain_snapshot: bool) -> None:
        """Let the saver finish all jobs; `ended` is set then.

        retain_snapshot: the trainer ends because of an error; the saver keeps memory for the next one
        (retained_snapshot.py).
        """
        self._closing = True
        self.send(Stop(retain_snapshot))

    def _listen(self) -> None:
        idle = False
        try:
            while (report := self._channel.receive(Report | Idle)) is not None:
                if isinstance(report, Idle):
                    idle = True
                else:
                    self._on_report(report)
            status = 0 if idle else self._process.wait()
            error = None if self._closing and status == 0 else self._death_error(status)
            self._saver_lock.close()
            self._channel.close()
            self._stderr.close()
            if error is not None:
                self._on_death(error)
        finally:
            self.ended.set()
        self._process.wait()  # it must not stay a zombie if this process goes on

    def _death_error(self, status: int) -> SaverDied:
        cause = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        self._stderr.seek(0)
        stderr_tail = self._stderr.read()[-_STDERR_TAIL_CHARACTERS:].decode(errors="replace").strip()
        return SaverDied(
            f"the saver process {self._process.pid} {cause}"
            + (f", with this output: {stderr_tail}" if stderr_tail else ""),
            "Unfinished saves are lost, committed checkpoints are safe. The next save starts a new saver",
        )


SaveWriter = ThreadWriter | ProcessWriter


def _start(sock: int, lock: int, note: NewNote, stderr: int) -> subprocess.Popen[bytes]:
    # The saver imports from the same paths as the trainer, never from its working directory.
    code = (
        f"import sys; sys.path[:] = {json.dumps(sys.path)}; from ckpt.saver.process import run; "
        f"run({sock}, {lock}, {note.fd}, {str(note.path)!r})"
    )
    # Threads of numerical libraries would compete with the training step.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    inherited = [fd for fd in (sock, lock, note.fd) if fd >= 0]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr, pass_fds=inherited,
            start_new_session=True, env=environment,
        )  # fmt: skip
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
