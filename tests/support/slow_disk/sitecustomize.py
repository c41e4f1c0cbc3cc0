"""Makes the disk slow for every Python that finds this folder on its PYTHONPATH: savers, above all.

CKPTD_TEST_DISK_BYTES_PER_S is its speed. Shards are written by os.pwrite, in packs of up to 8 MiB; all ranks of a test
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
_pwrite = os.pwrite


def _slow(fd: int, data: Any, offset: int) -> int:
    count = len(data)
    if count < _SMALL:
        return _pwrite(fd, data, offset)
    lock = os.open(_LOCK, os.O_RDWR | os.O_CREAT, 0o600) if _LOCK else -1
    try:
        if lock >= 0:
            fcntl.flock(lock, fcntl.LOCK_EX)
        piece = data[: 1 << 20]
        time.sleep(len(piece) / _RATE)
        return _pwrite(fd, piece, offset)  # the caller writes the rest
    finally:
        if lock >= 0:
            os.close(lock)


os.pwrite = _slow
