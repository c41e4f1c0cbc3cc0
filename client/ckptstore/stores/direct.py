"""Local files past the page cache, with direct I/O where the file system supports it: sequential writes, and reads.

Writes through the page cache cost one fault per page, take memory from training, and reach the disk only at fsync;
reads through it cost a copy and the management of its pages, which is three times the processor time.
Direct I/O requires aligned addresses, offsets and lengths. Memory that will not change is written from where it lies,
if its address and its place in the file are aligned alike: so are all chunks of a snapshot that is stored as it is. All
other bytes are copied into aligned buffers. Threads write while the caller prepares more.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from ckptstore.codecs.chunk_codecs import Buffer

PACK_BYTES = 8 << 20
"""Bytes collected before they are written."""
_LEAST_BORROWED = 8
"""Adjacent memory of less than 1/N of PACK_BYTES is copied: a write of its own would cost more."""
_AT_ONCE = 2
"""Writes of borrowed memory at once: the kernel prepares the pages of one while the disk has the other."""
_BLOCK = 4096
"""No common file system requires a coarser alignment; one that does is written through the page cache."""
_HUGE = 2 << 20
"""The kernel aligns only memory of a multiple of this size so that it can use huge pages."""
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_NOT_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)
"""Errors of file systems that reject direct I/O."""

WINDOW_BYTES = 8 << 20
"""Bytes that are read past the page cache at once: four threads with one read each keep a disk busy."""
_LEAST_DIRECT = 256 << 10
_SAMPLES = 16
"""Pages of a range of which the page cache is asked."""
_LEAST_RATE, _LATENCY_S = 64e6, 0.02
"""Bytes per second and thread of a device that may be read again; what slower ones have sent belongs into the cache."""

_FULL_SYNC = getattr(fcntl, "F_FULLFSYNC", None)
"""macOS: fsync reaches the drive, but not through its cache."""

_Bytes = npt.NDArray[np.uint8]
_libc = ctypes.PyDLL(None)
"""Keeps the interpreter's lock, for calls that are shorter than to get it back."""


def sync(fd: int) -> None:
    """Make a file or a folder durable. Raises OSError."""
    if _FULL_SYNC is not None:
        with suppress(OSError):  # of file systems without it, such as SMB
            fcntl.fcntl(fd, _FULL_SYNC)
            return
    os.fsync(fd)


class DirectFile:
    """Owns the descriptor of a new, empty file. Not for use by several threads at once.

    Methods raise OSError, including that of an earlier background write.
    """

    def __init__(self, fd: int, expected_bytes: int) -> None:
        self._fd = fd
        self._at = 0
        """Bytes written or being written, in whole blocks. Those in the pack follow, then the borrowed ones."""
        self._pack = _aligned_memory(PACK_BYTES)
        self._filled = 0
        self._other = _aligned_memory(PACK_BYTES)
        self._borrowed = _Borrowed(0, 0, [])
        self._writing: deque[tuple[Future[None], _Borrowed | None]] = deque()
        """The writes that are under way, oldest first, and the borrowed memory that they need."""
        self._threads: ThreadPoolExecutor | None = None
        self._direct = _set_direct(fd, True)
        if self._direct and expected_bytes:
            _preallocate(fd, expected_bytes)

    def write(self, data: Buffer) -> None:
        """Append. The caller may reuse the buffer afterwards; but read-only memory is borrowed, and must not change
        until the file is finished or closed."""
        if not len(data):
            return
        part = np.frombuffer(data, np.uint8)
        if part.flags.writeable:
            self._return_borrowed()
            self._copy(part)
            return
        address = _address(part)
        if self._borrowed.begin + self._borrowed.size != address:
            self._return_borrowed()
            if (address - self._filled) % _BLOCK:
                self._copy(part)
                return
            self._borrowed = _Borrowed(address, 0, [])
        self._borrowed.size += len(part)
        self._borrowed.parts.append(part)
        if self._borrowed.size >= PACK_BYTES:
            self._write_borrowed()

    def finish(self) -> None:
        """Write the remaining bytes, release excess preallocation, and make the file durable."""
        self._return_borrowed()
        size = self._at + self._filled
        padded = -(-self._filled // _BLOCK) * _BLOCK
        self._pack[self._filled : padded] = 0
        self._write_at([self._pack.data[:padded]], self._at)
        self._wait()
        os.ftruncate(self._fd, size)
        sync(self._fd)
        self.close()

    def close(self) -> None:
        """Wait for the background write and close the descriptor; may be called more than once."""
        if self._threads is not None:
            self._threads.shutdown(wait=True)
            self._threads = None
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _copy(self, rest: _Bytes | memoryview) -> None:
        """Append to the pack; nothing is borrowed."""
        while len(rest):
            count = min(len(rest), PACK_BYTES - self._filled)
            self._pack[self._filled : self._filled + count] = rest[:count]  # numpy copies without the GIL
            self._filled += count
            rest = rest[count:]
            if self._filled == PACK_BYTES:
                self._write_pack()

    def _return_borrowed(self) -> None:
        """Write what is worth a write, and copy the rest."""
        if self._borrowed.size * _LEAST_BORROWED >= PACK_BYTES:
            self._write_borrowed()
        rest, self._borrowed = self._borrowed, _Borrowed(0, 0, [])
        self._copy(rest.memory)

    def _write_borrowed(self) -> None:
        """Write the whole blocks of the borrowed memory. Bytes before the first one complete the pack."""
        head, self._borrowed = self._borrowed.split(-self._filled % _BLOCK)
        self._copy(head.memory)
        parts = []
        if self._filled == _BLOCK:  # the block in which the borrowed memory begins
            joint = _aligned_memory(_BLOCK)
            joint[:] = self._pack[:_BLOCK]
            parts, self._filled = [joint.data], 0
        else:
            self._write_pack()
        whole, self._borrowed = self._borrowed.split(self._borrowed.size // _BLOCK * _BLOCK)
        self._wait(_AT_ONCE - 1)
        self._begin_to_write([*parts, whole.memory], whole)

    def _write_pack(self) -> None:
        """Write the pack, which holds whole blocks."""
        if self._filled:
            self._wait()  # the other pack may be under way
            self._begin_to_write([self._pack.data[: self._filled]])
            self._pack, self._other, self._filled = self._other, self._pack, 0

    def _begin_to_write(self, parts: list[memoryview], borrowed: _Borrowed | None = None) -> None:
        """Write these, one behind the other, in the background. borrowed: is kept until then."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="ckpt-disk")
        self._writing.append((self._threads.submit(self._write_at, parts, self._at), borrowed))
        self._at += sum(map(len, parts))

    def _wait(self, most: int = 0) -> None:
        """Wait until at most so many writes are under way."""
        while len(self._writing) > most:
            writing, _ = self._writing.popleft()
            writing.result()

    def _write_at(self, rest: list[memoryview], offset: int) -> None:
        while rest := [part for part in rest if len(part)]:
            direct = self._direct
            try:
                count = os.pwritev(self._fd, rest, offset)
            except OSError as error:
                # Some file systems reject direct I/O only at the write, and a short write may end unaligned.
                if error.errno not in _NOT_DIRECT or not direct:
                    raise
                self._direct = _set_direct(self._fd, False)
                continue
            offset += count
            for number, part in enumerate(rest):
                rest[number] = part[count:]
                count -= min(count, len(part))


def read_direct(fd: int, offset: int, num_bytes: int, memory: _Bytes | None = None) -> memoryview:
    """The bytes of an open file from `offset`, read-only; fewer at its end. Raises OSError.

    They are aligned in memory as in the file, so that a DirectFile can write them from there. memory: to read to, from
    `_aligned_memory`, two blocks larger; None for new memory. Not for use by several threads at once.
    """
    begin = offset // _BLOCK * _BLOCK
    end = -(-(offset + num_bytes) // _BLOCK) * _BLOCK
    into = (_aligned_memory(end - begin) if memory is None else memory[: end - begin]).data
    direct, done = _set_direct(fd, True), 0
    try:
        while done < len(into):
            try:
                count = os.preadv(fd, [into[done:]], begin + done)
            except OSError as error:
                # As for writes; a read that ends with the file may have ended unaligned.
                if error.errno not in _NOT_DIRECT or not direct:
                    raise
                direct = _set_direct(fd, False)
                continue
            if not count:
                break
            done += count
    finally:
        if direct:
            _set_direct(fd, False)
    return into[offset - begin : max(offset - begin, min(done, offset - begin + num_bytes))].toreadonly()


class DirectReads:
    """Reads of an open file in order, past the page cache where that pays: a window at a time. For one thread.

    It does not pay where the cache has the bytes, and on slow devices, where the next restore finds them in it.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._cached: CachedPages | None = None
        self._memory: _Bytes | None = None
        self._window = memoryview(b"")
        self._at = self._end = 0
        """Where the window begins, and up to where windows are read."""
        self._slow = False

    def expect(self, offset: int, num_bytes: int) -> bool:
        """The next reads are within these bytes. Whether it pays to read them here."""
        pays = not self._slow and num_bytes >= _LEAST_DIRECT
        if pays:
            self._cached = self._cached or CachedPages(self._fd)
            pays = not self._cached.have(offset, num_bytes)
        self._end = offset + num_bytes if pays else 0
        return pays

    def read(self, offset: int, buffer: memoryview) -> int:
        """Fill the buffer as far as that pays; returns the number of bytes. Raises OSError."""
        done, into = 0, np.frombuffer(buffer, np.uint8)
        while done < len(into) and len(part := self._next(offset + done)[: len(into) - done]):
            into[done : done + len(part)] = np.frombuffer(part, np.uint8)  # numpy copies without the GIL
            done += len(part)
        return done

    def _next(self, offset: int) -> memoryview:
        """The bytes from `offset` on that are in memory, else the next window; empty: read through the page cache."""
        if not self._at <= offset < self._at + len(self._window):
            size = min(WINDOW_BYTES, self._end - offset)
            if size <= 0:
                return memoryview(b"")
            if self._memory is None:
                self._memory = _aligned_memory(WINDOW_BYTES + 2 * _BLOCK)
            self._window, began = memoryview(b""), time.monotonic()  # its memory is about to change
            self._window, self._at = read_direct(self._fd, offset, size, self._memory), offset
            self._slow = time.monotonic() - began > _LATENCY_S + size / _LEAST_RATE
        return self._window[offset - self._at :]


class CachedPages:
    """Which parts of an open file the page cache has. The mapping reads nothing, and lives as long as this object."""

    def __init__(self, fd: int) -> None:
        self._mapped: mmap.mmap | None = None
        with suppress(OSError, ValueError):  # the file is empty, or cannot be mapped
            self._mapped = mmap.mmap(fd, 0, prot=mmap.PROT_READ)

    def have(self, offset: int, num_bytes: int) -> bool:
        """Whether the page cache has most of a range, by some of its pages. True where that cannot be known."""
        pages = np.ones(_SAMPLES, np.uint8)
        if self._mapped is not None and (ask := getattr(_libc, "mincore", None)) is not None:
            begin, found = _address(np.frombuffer(self._mapped, np.uint8)) + offset, _address(pages)
            # Those who may not write the file get ones, whatever is cached. To ask about all pages takes a seventh of
            # the time in which they are read.
            for number in range(_SAMPLES):
                page = (begin + number * num_bytes // _SAMPLES) // mmap.PAGESIZE * mmap.PAGESIZE
                ask(ctypes.c_void_p(page), ctypes.c_size_t(1), ctypes.c_void_p(found + number))
        return bool(np.count_nonzero(pages & 1) * 2 > _SAMPLES)


class _Borrowed:
    """Adjacent memory of the caller."""

    def __init__(self, begin: int, size: int, parts: list[_Bytes]) -> None:
        """begin: the address. parts: keep the memory, and may keep more."""
        self.begin, self.size, self.parts = begin, size, parts

    def split(self, size: int) -> tuple[_Borrowed, _Borrowed]:
        """The first bytes, and the rest."""
        return _Borrowed(self.begin, size, self.parts), _Borrowed(self.begin + size, self.size - size, self.parts)

    @property
    def memory(self) -> memoryview:
        """All of it at once; it does not keep the parts."""
        return memoryview((ctypes.c_char * self.size).from_address(self.begin)).cast("B")


def _address(data: _Bytes) -> int:
    return int(data.__array_interface__["data"][0])


def _set_direct(fd: int, on: bool) -> bool:
    """Switch direct I/O on or off; returns whether it is on."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _O_DIRECT if on else flags & ~_O_DIRECT)
    except OSError:
        return False  # not supported by the file system
    return on and _O_DIRECT != 0


def _preallocate(fd: int, num_bytes: int) -> None:
    """Reserve space in few extents. A failure is ignored: writes work without it, and report errors themselves."""
    # posix_fallocate writes zeros if the file system cannot preallocate; the system call does not.
    fallocate = getattr(ctypes.CDLL(None), "fallocate", None)
    if fallocate is not None:
        fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        fallocate(fd, 0, 0, num_bytes)


def _aligned_memory(num_bytes: int) -> _Bytes:
    """Page-aligned memory; private, so that the kernel may use huge pages, which halve all costs."""
    whole = -(-num_bytes // _HUGE) * _HUGE if num_bytes > _BLOCK else num_bytes
    memory = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8, num_bytes)
