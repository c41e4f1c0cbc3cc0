"""A new local file, written from front to back past the page cache where the file system allows it.

Through the page cache a gigabyte is copied with one fault per page, takes memory from the training, and reaches the
disk as late as fsync. Direct I/O wants addresses, offsets and lengths aligned; so the bytes are packed into
aligned memory, which a thread writes while more is packed.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from ckptstore.format.codecs import Buffer
from ckptstore.stores.busy import BusyTime

PACK_BYTES = 8 << 20
"""Bytes that are packed before they are written."""
_BLOCK = 4096
"""No file system in use wants a coarser alignment; one that does is written through the page cache."""
_O_DIRECT = getattr(os, "O_DIRECT", 0)


class DirectFile:
    """Takes over the descriptor of a new, empty file. Not for use by several threads at once.

    Methods raise OSError, also for an earlier write that failed in the background.
    """

    def __init__(self, fd: int, expected_bytes: int = 0) -> None:
        self._fd = fd
        self._at = 0
        """How much is written, or being written."""
        self._pack = _aligned_memory(PACK_BYTES)
        self._filled = 0
        self._other = _aligned_memory(PACK_BYTES)
        self._writing: Future[None] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self.busy = BusyTime()
        self._direct = _set_direct(fd, True)
        if self._direct and expected_bytes:
            _preallocate(fd, expected_bytes)

    def write(self, data: Buffer) -> None:
        """Append; the caller may reuse the buffer afterwards."""
        rest = np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)
        while len(rest):
            count = min(len(rest), PACK_BYTES - self._filled)
            self._pack[self._filled : self._filled + count] = rest[:count]  # numpy copies without the GIL
            self._filled += count
            rest = rest[count:]
            if self._filled == PACK_BYTES:
                self._begin_to_write()

    def finish(self) -> None:
        """Write the rest, give back what was preallocated too much, and make the bytes durable."""
        size = self._at + self._filled
        padded = -(-self._filled // _BLOCK) * _BLOCK
        self._pack[self._filled : padded] = 0
        self._write_at(self._pack.data[:padded], self._at)
        self._settle()
        with self.busy:
            os.ftruncate(self._fd, size)
            os.fsync(self._fd)
        self.close()

    def close(self) -> None:
        """Give up the descriptor once nothing is being written; more than once is fine."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _begin_to_write(self) -> None:
        self._settle()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="ckpt-disk")
        self._writing = self._thread.submit(self._write_at, self._pack.data, self._at)
        self._at += PACK_BYTES
        self._pack, self._other, self._filled = self._other, self._pack, 0

    def _settle(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write_at(self, rest: memoryview, offset: int) -> None:
        while len(rest):
            direct = self._direct
            try:
                with self.busy:
                    count = os.pwrite(self._fd, rest, offset)
            except OSError as error:
                # Some file systems find out only now that they cannot; and a short write may end anywhere.
                if error.errno != errno.EINVAL or not direct:
                    raise
                self._direct = _set_direct(self._fd, False)
                continue
            offset += count
            rest = rest[count:]


def _set_direct(fd: int, on: bool) -> bool:
    """Whether writes are direct afterwards."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _O_DIRECT if on else flags & ~_O_DIRECT)
    except OSError:
        return False  # the file system cannot
    return on and _O_DIRECT != 0


def _preallocate(fd: int, num_bytes: int) -> None:
    """Have the file lie in few pieces. Writing goes on without, and tells what is wrong if that fails too."""
    # posix_fallocate writes zeros where the file system cannot preallocate; the system call does not.
    fallocate = getattr(ctypes.CDLL(None), "fallocate", None)
    if fallocate is not None:
        fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        fallocate(fd, 0, 0, num_bytes)


def _aligned_memory(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Memory that begins with a page; private, so that the system may use large pages, which halve all costs."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
