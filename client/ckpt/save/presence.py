"""Whether a saver of a run is still at work on this host. No torch.

A trainer that is restarted right after a SIGKILL must not resume from an older step than the one its predecessor's
saver is about to commit. A saver inherits a shared lock on a small file from the trainer that starts it, and holds it
while it lives; the lock ends with the process, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from pathlib import Path

import xxhash

_PAUSE_S = 0.05


def announce(store: str, run: str) -> int:
    """Take the shared lock of this run; it is held until every copy of the returned descriptor is closed."""
    fd = os.open(_path(store, run), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


def wait_for_savers(store: str, run: str, timeout_s: float) -> bool:
    """Wait until no saver of this run is at work on this host; False if one still is after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    fd = os.open(_path(store, run), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() > deadline:
                    return False
            time.sleep(_PAUSE_S)
    finally:
        os.close(fd)


def _path(store: str, run: str) -> Path:
    folder = Path(tempfile.gettempdir()) / f"ckpt-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / (xxhash.xxh3_64_hexdigest(f"{store} {run}".encode()) + ".lock")
