"""Whether the saver of a killed trainer is still at work on this host. No torch.

A trainer that is restarted right after a SIGKILL must not resume from an older step than the one its predecessor's
saver is about to commit. Two small files per run tell: a trainer holds a shared lock on one, its saver on the
other until its uploads are done. Locks end with their process, however it ends; a saver without a trainer is
finishing its jobs.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from pathlib import Path

import xxhash

from ckpt.saver.segment import close_after_fork

_PAUSE_S = 0.05


class SaverLock:
    """The locks of one trainer and its saver, held from before the saver starts."""

    def __init__(self, store: str, run: str) -> None:
        self._trainer = _hold(_path(store, run, "trainer"))
        self.saver = _hold(_path(store, run, "saver"))
        """For the saver to inherit."""
        close_after_fork(self)

    def inherited(self) -> None:
        """The saver has its copy; this process gives up its own."""
        os.close(self.saver)

    def close(self) -> None:
        """The trainer has closed its saver."""
        self.close_in_child()

    def close_in_child(self) -> None:
        """Give up the trainer's lock, or a fork's copy of it."""
        fd, self._trainer = self._trainer, -1
        if fd >= 0:
            os.close(fd)


def wait_for_orphans(store: str, run: str, timeout_s: float) -> bool:
    """Wait while a saver of this run is at work on this host whose trainer is gone; False if it still is at the end."""
    deadline = time.monotonic() + timeout_s
    trainer, saver = _path(store, run, "trainer"), _path(store, run, "saver")
    while _is_held(saver) and not _is_held(trainer):
        if time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE_S)
    return True


def _hold(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


def _is_held(path: Path) -> bool:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(fd)


def _path(store: str, run: str, role: str) -> Path:
    folder = Path(tempfile.gettempdir()) / f"ckpt-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / f"{xxhash.xxh3_64_hexdigest(f'{store} {run}'.encode())}.{role}"
