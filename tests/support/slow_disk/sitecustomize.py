"""Makes the disk slow for every Python that finds this folder on its PYTHONPATH: savers, above all.

CKPTD_TEST_DISK_BYTES_PER_S is its speed. Shards are written by os.pwritev, in packs of up to 8 MiB; all ranks of a test
that give CKPTD_TEST_DISK_LOCK, a file, share one disk.
"""

from __future__ import annotations

import fcntl
import os
import time
from typing import Any

_RATE = float(os.environ.get("CKPTD_TEST_DISK_BYTES_PER_S", "inf"))
_LOCK = os.environ.get("CKPTD_TEST_DISK_LOCK")
_SMALL = 64 << 10  # notes and documents are not what a disk is slow with
_pwritev = os.pwritev


def _slow(fd: int, parts: Any, offset: int, flags: int = 0) -> int:
    data = parts[0]
    if len(data) < _SMALL:
        return _pwritev(fd, [data], offset)
    lock = os.open(_LOCK, os.O_RDWR | os.O_CREAT, 0o600) if _LOCK else -1
    try:
        if lock >= 0:
            fcntl.flock(lock, fcntl.LOCK_EX)
        piece = data[: 1 << 20]
        time.sleep(len(piece) / _RATE)
        return _pwritev(fd, [piece], offset)  # the caller writes the rest
    finally:
        if lock >= 0:
            os.close(lock)


os.pwritev = _slow
