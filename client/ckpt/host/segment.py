"""Shared memory that the trainer stages into and the saver reads from.

A segment has no name in any file system: it exists as long as a process holds its descriptor or a mapping. So a
SIGKILL of the trainer loses nothing, and nothing leaks after the saver has ended.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

_T = TypeVar("_T")

_POPULATE_STRIDE = 64 << 20
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_MFD_NOEXEC_SEAL = 8

_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)

_after_fork: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()

no_fork = threading.RLock()
"""Held while descriptors are made that forked children must not keep: forks in other threads wait for it."""
os.register_at_fork(before=no_fork.acquire, after_in_parent=no_fork.release, after_in_child=no_fork.release)


def close_after_fork(resource: _T, close: Callable[[_T], None]) -> None:
    """Call `close` in forked children (DataLoader workers), so that they hold no descriptors of the resource."""
    _after_fork[resource] = close


def _close_all() -> None:
    for resource, close in list(_after_fork.items()):
        with suppress(OSError):  # one that is closed already must not keep the others open
            close(resource)


os.register_at_fork(after_in_child=_close_all)


class Segment:
    """Shared memory mapped into this process. Forked children have neither the mapping nor the descriptor."""

    def __init__(self, num_bytes: int, fd: int | None = None, writable: bool = True) -> None:
        """Create a segment, or map the one of a received descriptor, which it owns, also if this raises OSError.

        writable: otherwise `view` must only be read.
        """
        self.num_bytes = num_bytes
        self.fd = -1
        self.fd = _ANONYMOUS() if fd is None else fd
        self._before_unmap: list[Callable[[], object]] = []
        protection, size = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0), max(1, num_bytes)
        if fd is None:
            os.ftruncate(self.fd, size)
        # Python's mmap keeps a copy of the descriptor, which forked children would inherit.
        address = _libc.mmap(None, size, protection, mmap.MAP_SHARED, self.fd, 0)
        if address in (None, _MAP_FAILED):
            number = ctypes.get_errno()
            self.close()  # the error keeps this object
            raise OSError(number, f"cannot map {size} bytes of shared memory: {os.strerror(number)}")
        if hasattr(mmap, "MADV_DONTFORK"):
            _libc.madvise(address, size, mmap.MADV_DONTFORK)
        self.map = (ctypes.c_char * size).from_address(address)
        """The bytes, as an object with the buffer interface; unmapped when its last view is released."""
        weakref.finalize(self.map, _unmap, address, size, os.getpid(), self._before_unmap).atexit = False
        close_after_fork(self, Segment.close)

    def __del__(self) -> None:
        self.close()

    @property
    def view(self) -> memoryview:
        """The bytes."""
        return memoryview(self.map).cast("B")[: self.num_bytes]

    def before_unmap(self, call: Callable[[], object]) -> None:
        """Call it before the memory is unmapped: when its last view is released, not when the interpreter ends."""
        self._before_unmap.append(call)

    def close(self) -> None:
        """Close the descriptor. The mapping stays until its last view is released; a forked child has none."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def _unmap(address: int, num_bytes: int, pid: int, before: Sequence[Callable[[], object]]) -> None:
    if os.getpid() == pid:  # a forked child has neither the mapping, whose address may belong to another one, nor CUDA
        for call in before:
            call()
        _libc.munmap(address, num_bytes)


def memfd() -> int:
    """Anonymous shared memory on Linux. Its descriptor is not inherited by exec."""
    with suppress(OSError):  # hardened hosts require the flag, and Linux before 6.3 does not know it
        return os.memfd_create("ckpt-arena", os.MFD_CLOEXEC | _MFD_NOEXEC_SEAL)
    return os.memfd_create("ckpt-arena", os.MFD_CLOEXEC)


def posix_shared_memory() -> int:
    """POSIX shared memory for other systems; unlinked at once, so that only descriptors keep it."""
    import _posixshmem  # type: ignore[import-not-found]

    name = f"/ckpt-{secrets.token_hex(8)}"
    fd = _posixshmem.shm_open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    _posixshmem.shm_unlink(name)
    return int(fd)


_ANONYMOUS = memfd if sys.platform == "linux" else posix_shared_memory


def populate(segment: Segment) -> None:
    """Populate all pages now, so that no later copy has page faults. Releases the GIL.

    They are large ones where the system gives these to processes that ask (shmem_enabled): a direct write from them
    takes a third of the kernel's time.
    """
    start, large = ctypes.addressof(segment.map), False
    with suppress(OSError):
        large = "[advise]" in _LARGE_PAGES.read_text()
    if large:
        _libc.madvise(start, segment.num_bytes, _MADV_HUGEPAGE)
    for at in range(0, segment.num_bytes, _POPULATE_STRIDE):
        size = min(_POPULATE_STRIDE, segment.num_bytes - at)
        if large and _libc.madvise(start + at, size, _MADV_POPULATE_WRITE) == 0:
            continue
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(segment.fd, at, size)  # small pages, twice as fast as page faults
        if sys.platform != "linux" or _libc.madvise(start + at, size, _MADV_POPULATE_WRITE) != 0:
            _libc.memset(start + at, 0, size)
