"""SaverLock: file locks that show whether the saver of a killed trainer is still uploading on this host.

A trainer that is restarted right after a SIGKILL must not resume from an older step than the one its predecessor's
saver is about to commit. There are two lock files per run: the trainer holds a shared lock on one, its saver on the
other until its uploads are done. The kernel releases a lock when its process ends, in any way. If only the saver's
lock is held, an orphaned saver is finishing its jobs. A process that tests these locks holds a third one meanwhile.

A note beside the locks remembers that the run had a checkpoint: a store that has nothing of it later is not mounted.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

from ckpt.saver.segment import close_after_fork
from ckptstore.errors import CkptError, InvalidRequest
from ckptstore.retry import pauses

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05


class SaverLock:
    """The locks of one trainer and its saver. Acquired before the saver starts."""

    def __init__(self, store: str, run: str) -> None:
        """Raises InvalidRequest if the folder of lock files is not this user's alone."""
        self._trainer = _hold(host_path(store, run, "trainer"))
        self.saver = _hold(host_path(store, run, "saver"))
        """The descriptor that the saver inherits."""
        close_after_fork(self)

    def inherited(self) -> None:
        """Close this process's copy of the saver's descriptor; the saver has inherited it."""
        os.close(self.saver)

    def close(self) -> None:
        """Release the trainer's lock; its saver has ended."""
        self.close_in_child()

    def close_in_child(self) -> None:
        """Close the trainer's descriptor, or a fork's copy of it."""
        fd, self._trainer = self._trainer, -1
        if fd >= 0:
            os.close(fd)


def wait_for_orphans(store: str, run: str, timeout_s: float) -> bool:
    """Wait while an orphaned saver of this run is uploading on this host; False if it still is after `timeout_s`."""
    deadline, waits = time.monotonic() + timeout_s, pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
    while _may_be_orphaned(store, run):
        if time.monotonic() > deadline:
            return False
        time.sleep(next(waits))
    return True


def _may_be_orphaned(store: str, run: str) -> bool:
    """True as well while another process tests the locks. A test takes them for a moment, so of two ranks that test at
    the same time one would take the other for a trainer that is alive."""
    with _locked(host_path(store, run, "test")) as alone:
        return not alone or (
            _is_held(host_path(store, run, "saver")) and not _is_held(host_path(store, run, "trainer"))
        )


def note_checkpoint(store: str, run: str) -> None:
    """Remember on this host that the run has a checkpoint. Never raises: without the note nothing is missed."""
    try:
        host_path(store, run, "known").write_text(f"{store} {run}\n")
    except (CkptError, OSError) as error:
        logger.warning("cannot note that run %r has a checkpoint: %s", run, error)


def noted_checkpoint(store: str, run: str) -> Path | None:
    """The note that the run had a checkpoint, if there is one. Raises InvalidRequest as SaverLock does."""
    path = host_path(store, run, "known")
    return path if path.exists() else None


@contextmanager
def try_lock(store: str, run: str, role: str) -> Iterator[bool]:
    """Hold a lock of this host in the block; False if another thread or process holds it. Raises InvalidRequest."""
    with _locked(host_path(store, run, role)) as locked:
        yield locked


def _hold(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


def _is_held(path: Path) -> bool:
    with _locked(path) as locked:
        return not locked


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)


def host_path(store: str, run: str, role: str) -> Path:
    """A file of one run in this host's folder. role: the end of its name. Raises InvalidRequest as SaverLock does."""
    return host_folder() / f"{xxhash.xxh3_64_hexdigest(f'{store} {run}'.encode())}.{role}"


def host_folder() -> Path:
    """This user's folder for locks and notes, in the temporary directory.

    Raises InvalidRequest if another user can reach into it. That user could hold the locks, and saves would wait for
    them without end.
    """
    folder = Path(tempfile.gettempdir()) / f"ckpt-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    mode = stat.S_IMODE(found.st_mode)
    for problem, applies in (
        ("is not a folder", not stat.S_ISDIR(found.st_mode)),
        (f"belongs to user {found.st_uid}", found.st_uid != os.getuid()),
        (f"has mode {mode:04o}, so that other users can reach into it", mode & 0o077),
    ):
        if applies:
            raise InvalidRequest(
                f"the folder of lock files {folder} {problem}",
                "Remove it, or chmod 700 it if it is yours, or set TMPDIR to a folder that only you can write to",
            )
    return folder
