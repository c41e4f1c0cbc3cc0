"""Presence: what the savers of this host still have to make durable, for `ckpt-run` and `ckptctl drain`.

Each saver keeps a note about itself in the folder of the locks (ckpt.host.lock). It holds a lock on the note while it
lives, so that a note whose saver was killed is recognized, and removed. A note is one line of JSON, written at one
place by one call. Without notes nothing is lost but the wait.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from math import prod
from pathlib import Path

import msgspec

from ckpt.host.lock import hold_folder, host_folder, locked, sweep_folder, temporary_folder, touch_locks
from ckpt.saver.messages import Done, Failed, LocalOnly, Released, Report, SaveJob, SaveProgress, Setup
from ckptstore.clock import system_clock
from ckptstore.codecs.dtypes import ITEM_BYTES
from ckptstore.errors import CkptError
from ckptstore.format.decoding import decode_json
from ckptstore.names import new_ulid
from ckptstore.values import Record

logger = logging.getLogger(__name__)

_SUFFIX = ".note"
_NUM_BYTES = 4096
_EVERY_S = 0.2
_PROGRAM = b"from ckpt.saver.process import run"
_POLL_S = 0.1
_LOADING_S = 1.0
"""How long the kernel may take to load a saver. It takes microseconds, unless other work has the cores."""
_OTHERS_S = 10.0
"""How long to wait for receipts of other ranks: any process that sees all of them can commit."""


class SaverState(Record):
    """One saver."""

    pid: int
    trainer: int = 0
    """Process id of its trainer, in the namespace of both."""
    store: str = ""
    run: str = ""
    rank: int = 0
    uploading: int = 1
    """Accepted saves whose shard and receipt are not durable. A saver that has no note yet counts as one."""
    waiting: int = 0
    """Saves that wait for other ranks, or for the commit."""
    failed: int = 0
    done_bytes: int = 0
    all_bytes: int = 0
    """Raw bytes of the saves that are being uploaded."""
    local_only: int = 0
    """Checkpoints that are to be replicated to the remote store."""
    local_only_bytes: int = 0
    local_only_since: float | None = None
    """When the oldest of them was committed locally; null: there is none."""
    orphaned: bool = False
    """Its trainer is gone, and it has read all that the trainer had sent."""
    idle: bool = False
    """All its work is done: it only keeps memory for the next trainer (retained_snapshot.py)."""


class SaverNote:
    """The note of this saver process. For any thread. Errors of the folder are logged once, and change nothing."""

    def __init__(self, setup: Setup) -> None:
        self._state = SaverState(
            pid=os.getpid(),
            trainer=setup.trainer,
            store=setup.home,
            run=setup.run,
            rank=setup.rank,
            uploading=0,
        )
        self._lock = threading.Lock()
        """Guards the fields below."""
        self._jobs: dict[int, list[int]] = {}
        """Bytes and uploaded bytes of the saves that are being uploaded."""
        self._waiting: set[int] = set()
        self._failed = 0
        self._local = LocalOnly(0, 0, None)
        self._written_at = 0.0
        self._path, self._fd, self._folder = Path(), -1, -1
        try:
            self._create()
        except (CkptError, OSError) as error:
            logger.warning("other programs cannot see this saver: %s", error)

    def accepted(self, job: SaveJob) -> None:
        """A save is accepted."""
        num_bytes = sum(prod(row.box[len(row.box) // 2 :]) * ITEM_BYTES[row.dtype] for row in job.slices)
        touch_locks(self._state.store, self._state.run)
        with self._lock:
            self._jobs[job.number] = [num_bytes, 0]
            self._write()

    def reported(self, report: Report) -> None:
        """Something became of a save."""
        with self._lock:
            if isinstance(report, SaveProgress):
                if report.number in self._jobs:
                    self._jobs[report.number][1] = report.done_bytes
                if time.monotonic() < self._written_at + _EVERY_S:
                    return
            elif isinstance(report, LocalOnly):
                self._local = report
            elif isinstance(report, Released | Done | Failed):
                self._jobs.pop(report.number, None)
                self._waiting.discard(report.number)
                if isinstance(report, Released):
                    self._waiting.add(report.number)
                self._failed += isinstance(report, Failed) and report.code != "save_skipped"
            self._write()

    def orphaned(self, idle: bool = False) -> None:
        """The trainer is gone. idle: and all work is done."""
        with self._lock:
            self._state = msgspec.structs.replace(self._state, orphaned=True, idle=idle)
            self._write()

    def close(self) -> None:
        """Remove the note: this saver ends."""
        with self._lock:
            fd, folder, self._fd, self._folder = self._fd, self._folder, -1, -1
        if fd >= 0:
            self._path.unlink(missing_ok=True)
            os.close(fd)
        if folder >= 0:
            os.close(folder)

    def _create(self) -> None:
        sweep_folder()
        self._folder = hold_folder()  # the locks must stay there although the trainer has gone
        name = f"{new_ulid(system_clock())}{_SUFFIX}"
        temporary = host_folder() / f"{name}.new"  # it gets its name when it is locked
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        self._path, self._fd = temporary.with_name(name), fd
        self._write()
        temporary.rename(self._path)

    def _write(self) -> None:
        if self._fd < 0:
            return
        self._written_at = time.monotonic()
        state = msgspec.structs.replace(
            self._state,
            uploading=len(self._jobs),
            waiting=len(self._waiting),
            failed=self._failed,
            done_bytes=sum(done for _, done in self._jobs.values()),
            all_bytes=sum(size for size, _ in self._jobs.values()),
            local_only=self._local.checkpoints,
            local_only_bytes=self._local.bytes,
            local_only_since=self._local.since,
        )
        try:
            os.pwrite(self._fd, msgspec.json.encode(state).ljust(_NUM_BYTES), 0)
        except OSError as error:
            logger.warning("other programs cannot see the progress of this saver: %s", error)
            self._fd = -1


def savers() -> list[SaverState]:
    """The savers of this user on this host that may have work, also those without a note yet.

    Raises InvalidRequest as SaverLock does.
    """
    noted = [state for path in sorted(host_folder().glob(f"*{_SUFFIX}")) if (state := _read(path)) is not None]
    known = {state.pid for state in noted}
    return [state for state in noted if not state.idle] + [
        SaverState(pid=pid, trainer=parent_of(pid)) for pid in _processes() if pid not in known
    ]


def unfinished(states: Collection[SaverState], waited_s: float, trainers_too: bool = False) -> list[SaverState]:
    """The savers that are not done. Pure but for /proc.

    waited_s: for how long nothing has been uploaded any more. trainers_too: one whose trainer still runs is not done.
    """
    return [
        state
        for state in states
        if state.uploading
        or state.local_only
        or (state.waiting and state.rank == 0 and waited_s < _OTHERS_S)
        or not (state.orphaned or (_runs(state.trainer) and not trainers_too))  # it may not have read the last save
    ]


def drain(
    find: Callable[[], Collection[SaverState]],
    timeout_s: float,
    progress: Callable[[Collection[SaverState]], object],
    sleep: Callable[[float], object] = time.sleep,
    *,
    trainers_too: bool = False,
) -> list[SaverState]:
    """Wait until the savers that `find` returns are done; the ones that are not after `timeout_s`.

    progress: called with the savers at each look. sleep: returns something true to end the wait. trainers_too: a saver
    is not done while its trainer runs, which may save once more.
    """
    deadline = time.monotonic() + timeout_s
    idle_since = time.monotonic()
    while True:
        states = find()
        now = time.monotonic()
        if any(state.uploading or state.local_only for state in states):
            idle_since = now
        left = unfinished(states, now - idle_since, trainers_too)
        progress(states)
        if not left or now >= deadline or sleep(min(_POLL_S, deadline - now)):
            return left


def describe(states: Collection[SaverState]) -> str:
    """The savers in one line."""
    return "; ".join(
        f"run {state.run} rank {state.rank}: "
        + (f"{state.done_bytes:,} of {state.all_bytes:,} bytes" if state.uploading else _idle(state))
        if state.run
        else f"process {state.pid} begins"
        for state in states
    )


def _idle(state: SaverState) -> str:
    if state.local_only:
        return f"{state.local_only} local only, {state.local_only_bytes:,} bytes to replicate"
    return "waits for other ranks" if state.waiting else "its trainer still runs"


def parent_of(pid: int) -> int:
    """Process id of the parent; 0 if there is none, or it is not known."""
    fields = _status(pid)
    return int(fields[1]) if fields else 0


def is_descendant(pid: int, ancestor: int) -> bool:
    """Whether a process was started by another one, or by one of its descendants, or was left to it."""
    while pid > 1 and pid != ancestor:
        pid = parent_of(pid)
    return pid == ancestor


def _read(path: Path) -> SaverState | None:
    """The state in a note; None if its saver is gone."""
    with suppress(CkptError, OSError, msgspec.DecodeError), locked(path, os.O_RDWR) as is_left:
        if not is_left:
            return decode_json(path.read_bytes(), SaverState)
        path.unlink(missing_ok=True)
    return None


def _processes() -> Iterator[int]:
    """Savers by their command line, where the system shows it. Those with another temporary folder are left out: their
    notes are there, and they would look as if they never began."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (
                entry.stat().st_uid == os.getuid()
                and _PROGRAM in read_loaded(entry / "cmdline")
                and _has_temporary_folder(read_loaded(entry / "environ"))
            ):
                yield int(entry.name)


def read_loaded(path: Path) -> bytes:
    """Bytes of /proc/PID/cmdline or environ. Waits while they are empty because the kernel loads the program: a trainer
    may have handed a save to it by then. Raises OSError for kernel threads and processes that have ended."""
    end = time.monotonic() + _LOADING_S
    while not (content := path.read_bytes()) and time.monotonic() < end:
        os.readlink(path.with_name("exe"))
        time.sleep(0.001)
    return content


def _has_temporary_folder(environment: bytes) -> bool:
    """Whether a process with this environment writes its note to the folder that is read here."""
    variables = dict(os.fsdecode(one).partition("=")[::2] for one in environment.split(b"\0"))
    return temporary_folder(variables).resolve() == temporary_folder(os.environ).resolve()


def _runs(pid: int) -> bool:
    fields = _status(pid)
    return bool(fields) and fields[0] not in "ZX"


def _status(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name: state, parent, ...; empty without such a process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
