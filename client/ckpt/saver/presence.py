"""Presence: what the savers of this host still have to make durable, for `ckpt-run` and `ckptctl drain`.

Each saver has a note in the folder of the locks (ckpt.host.lock). Its trainer makes the note, and counts in it the
saves that it sends, so that one which the saver has not read is not missed. The saver holds a lock on the note while it
lives, so that a note whose saver was killed is recognized, and removed. Without notes nothing is lost but the wait.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from ckpt.host.lock import hold_folder, host_folder, locked, sweep_folder, touch_locks
from ckpt.saver.messages import Done, Failed, LocalOnly, Released, Report, SaveJob, SaveProgress, Setup
from ckptstore.clock import system_clock
from ckptstore.errors import CkptError
from ckptstore.format.decoding import decode_json
from ckptstore.names import new_ulid
from ckptstore.values import Record

logger = logging.getLogger(__name__)

_SUFFIX = ".note"
_NUM_BYTES = 4096
_DIGEST = struct.Struct("<Q")
"""The digest of the state that follows: a read and a write of a file may overlap."""
_SENT = struct.Struct("<QQ")
"""After these bytes, by the trainer: the process id of the saver, and the number of saves that it was sent."""
_READS, _READ_AGAIN_S = 200, 0.001
_EVERY_S = 0.2
_POLL_S = 0.1
_OTHERS_S = 10.0
"""How long to wait for receipts of other ranks: any process that sees all of them can commit."""


class SaverState(Record):
    """One saver."""

    pid: int = 0
    trainer: int = 0
    """Process id of its trainer, in the namespace of both."""
    store: str = ""
    run: str = ""
    rank: int = 0
    uploading: int = 0
    """Accepted saves whose shard and receipt are not durable, or which it has not read yet."""
    read: int = 0
    """All saves that it has read."""
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


class NewNote:
    """A note whose saver is about to start, in its trainer. Errors of the folder are logged, and change nothing."""

    def __init__(self, setup: Setup) -> None:
        self.path, self.fd, self._counts = Path(), -1, [0, 0]
        try:
            sweep_folder()
            path = host_folder() / f"{new_ulid(system_clock())}{_SUFFIX}"
            temporary = path.with_name(f"{path.name}.new")  # it gets its name when it is locked
            self.fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(self.fd, fcntl.LOCK_EX)
            _write(self.fd, SaverState(trainer=os.getpid(), store=setup.home, run=setup.run, rank=setup.rank))
            os.pwrite(self.fd, _SENT.pack(*self._counts), _NUM_BYTES)
            self.path = temporary.rename(path)
        except (CkptError, OSError) as error:
            logger.warning("other programs cannot see the saver of this process: %s", error)
            self.close()

    def inherited(self, pid: int) -> None:
        """A saver has started, and holds the lock from now on."""
        self.close()
        self._counts[0] = pid
        self._write_counts()

    def sending(self) -> None:
        """A save will be sent next."""
        self._counts[1] += 1
        self._write_counts()

    def close(self) -> None:
        """Close this process's copy of the descriptor."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def _write_counts(self) -> None:
        with suppress(OSError), self.path.open("r+b", buffering=0) as file:  # the saver may be gone
            os.pwrite(file.fileno(), _SENT.pack(*self._counts), _NUM_BYTES)


class SaverNote:
    """The note of this saver process. For any thread. Errors of the folder are logged once, and change nothing."""

    def __init__(self, setup: Setup, fd: int, path: Path) -> None:
        """fd: the inherited descriptor of the note, with its lock; -1: there is none."""
        self._state = SaverState(
            pid=os.getpid(), trainer=setup.trainer, store=setup.home, run=setup.run, rank=setup.rank
        )
        self._lock = threading.Lock()
        """Guards the fields below."""
        self._jobs: dict[int, list[int]] = {}
        """Bytes and uploaded bytes of the saves that are being uploaded."""
        self._waiting: set[int] = set()
        self._written_at = 0.0
        self._path, self._fd = path, fd
        with suppress(CkptError):
            hold_folder()  # until this process ends: the locks must stay there although the trainer has gone

    def accepted(self, job: SaveJob) -> None:
        """A save is accepted."""
        num_bytes = sum(place.slice.bytes for place in job.slices)
        touch_locks(self._state.store, self._state.run)
        with self._lock:
            self._jobs[job.number] = [num_bytes, 0]
            self._write(read=self._state.read + 1)

    def reported(self, report: Report) -> None:
        """Something became of a save."""
        changed: dict[str, Any] = {}
        with self._lock:
            if isinstance(report, SaveProgress):
                if report.number in self._jobs:
                    self._jobs[report.number][1] = report.done_bytes
                if time.monotonic() < self._written_at + _EVERY_S:
                    return
            elif isinstance(report, LocalOnly):
                changed = {
                    "local_only": report.checkpoints,
                    "local_only_bytes": report.bytes,
                    "local_only_since": report.since,
                }
            elif isinstance(report, Released | Done | Failed):
                self._jobs.pop(report.number, None)
                self._waiting.discard(report.number)
                if isinstance(report, Released):
                    self._waiting.add(report.number)
                failed = isinstance(report, Failed) and report.code != "save_skipped"
                changed = {"failed": self._state.failed + failed}
            self._write(**changed)

    def orphaned(self, idle: bool = False) -> None:
        """The trainer is gone. idle: and all work is done."""
        with self._lock:
            self._write(orphaned=True, idle=idle)

    def close(self) -> None:
        """Remove the note: this saver ends."""
        with self._lock:
            if self._fd >= 0:
                self._path.unlink(missing_ok=True)
                os.close(self._fd)
            self._fd = -1

    def _write(self, **changed: Any) -> None:
        """Write the state, with these fields of it changed."""
        if self._fd < 0:
            return
        self._written_at = time.monotonic()
        self._state = msgspec.structs.replace(
            self._state,
            uploading=len(self._jobs),
            waiting=len(self._waiting),
            done_bytes=sum(done for _, done in self._jobs.values()),
            all_bytes=sum(size for size, _ in self._jobs.values()),
            **changed,
        )
        try:
            _write(self._fd, self._state)
        except OSError as error:
            logger.warning("other programs cannot see the progress of this saver: %s", error)
            self._fd = -1


def savers() -> list[SaverState]:
    """The savers of this user on this host that may have work. Raises InvalidRequest as SaverLock does."""
    states = [_read(path) for path in sorted(host_folder().glob(f"*{_SUFFIX}"))]
    return [state for state in states if state is not None and state.pid and not state.idle]


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
    idle_since = time.monotonic()
    deadline = idle_since + timeout_s
    while True:
        states = find()
        now = time.monotonic()
        if any(state.uploading or state.local_only for state in states):
            idle_since = now
        left = [
            state
            for state in states
            if state.uploading
            or state.local_only
            or (state.waiting and state.rank == 0 and now - idle_since < _OTHERS_S)
            or not (state.orphaned or (_runs(state.trainer) and not trainers_too))  # it may not have read the last save
        ]
        progress(states)
        if not left or now >= deadline or sleep(min(_POLL_S, deadline - now)):
            return left


def describe(states: Collection[SaverState]) -> str:
    """The savers in one line."""
    return "; ".join(
        f"run {state.run} rank {state.rank}: "
        + (f"{state.done_bytes:,} of {state.all_bytes:,} bytes" if state.uploading else _idle(state))
        for state in states
    )


def _idle(state: SaverState) -> str:
    if state.local_only:
        return f"{state.local_only} local only, {state.local_only_bytes:,} bytes to replicate"
    return "waits for other ranks" if state.waiting else "its trainer still runs"


def parent_of(pid: int) -> int:
    """Process id of the parent; 0 if there is none, or it is not known."""
    return int(_status(pid)[1])


def is_descendant(pid: int, ancestor: int) -> bool:
    """Whether a process was started by another one, or by one of its descendants, or was left to it."""
    while pid > 1 and pid != ancestor:
        pid = parent_of(pid)
    return pid == ancestor


def _write(fd: int, state: SaverState) -> None:
    encoded = msgspec.json.encode(state).ljust(_NUM_BYTES - _DIGEST.size)
    os.pwrite(fd, _DIGEST.pack(xxhash.xxh3_64_intdigest(encoded)) + encoded, 0)


def _read(path: Path) -> SaverState | None:
    """The state in a note; None if its saver is gone. One that cannot be read, of another version, counts as busy."""
    with suppress(CkptError, OSError):
        for _ in range(_READS):
            with locked(path, os.O_RDWR) as is_left:
                if is_left:
                    path.unlink(missing_ok=True)
                    return None
            content = path.read_bytes()
            encoded = content[_DIGEST.size : _NUM_BYTES]
            if content[: _DIGEST.size] == _DIGEST.pack(xxhash.xxh3_64_intdigest(encoded)):
                state, (pid, num_sent) = decode_json(encoded, SaverState), _SENT.unpack_from(content, _NUM_BYTES)
                unread = 0 if state.orphaned else num_sent - state.read
                return msgspec.structs.replace(state, pid=state.pid or pid, uploading=state.uploading + unread)
            time.sleep(_READ_AGAIN_S)
        return SaverState(pid=-1, store=str(path), uploading=1)
    return None


def _runs(pid: int) -> bool:
    return _status(pid)[0] not in "ZX"


def _status(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name: state, parent, ...; without such a process, of a dead one."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X", "0"]
