"""The loops over one block or chunk, compiled: fused.c, called through ctypes, which releases the GIL.

It is built with the distribution where there is a C compiler (hatch_build.py), and needs nothing of Python's or numpy's
headers. Without it passes.py does the same, with the same results bit by bit. Sizes are checked here and in
float_split.py: the compiled code trusts its arguments.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

from ckptstore.codecs import passes
from ckptstore.codecs.dtypes import Extremes
from ckptstore.codecs.passes import BLOCK_BYTES, LIMITS, Codes, Plane

LIBRARY = Path(__file__).with_name("libfused.so.1")  # Python imports no module of this name
SOURCE = LIBRARY.with_name("fused.c")

_HASHED_LEAST = 241
"""XXH3 has other algorithms for fewer bytes."""
_LAYOUT_WORDS = 32
"""For each tensor: enough for 14 dimensions, on average."""
_GROUP_WORDS, _STRETCH = 8, 128
"""Words that count as one escape, and words that are searched at once: they bound the number of places written."""


def load(path: Path) -> ctypes.CDLL | None:
    """The library; None if it was not built, is older than a source beside it, cannot be loaded on this machine, or
    lacks a function: another version built it."""
    if sys.byteorder != "little":
        return None
    try:
        source = path.with_name(SOURCE.name)
        if source.exists() and path.stat().st_mtime < source.stat().st_mtime:
            return None
        return _declared(ctypes.CDLL(os.fspath(path)))
    except (OSError, AttributeError):
        return None


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """The library, with the types of its functions. Raises AttributeError if it lacks one."""
    address: Any
    address, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
    block: list[Any] = [address, number, size, number, ctypes.c_uint]
    library.ckpt_split.argtypes = [*block, *[address] * 7]
    library.ckpt_split.restype = ctypes.c_long
    library.ckpt_join.argtypes = [*block, number, address, number, *[address] * 4, size]
    library.ckpt_scan.argtypes = [address, number, size, size, address, address]
    library.ckpt_scan.restype = None
    library.ckpt_read.argtypes = [number, ctypes.c_long, address, size, address]
    library.ckpt_read.restype = ctypes.c_long
    library.ckpt_move.argtypes = [address, size]
    library.ckpt_move.restype = None
    library.ckpt_differ.argtypes = [address, size, size, size, address]
    library.ckpt_differ.restype = size
    of_python = ctypes.PYFUNCTYPE(size, address, address, size, address, size)  # does not release the GIL
    vars(library)["layouts"] = of_python(("ckpt_layouts", library))
    return library


_library: Any = load(LIBRARY)
IS_BUILT = _library is not None
"""Whether the loops can be used."""


class _Found(ctypes.Structure):
    """The properties of a block."""

    _fields_ = (
        ("unsigned", ctypes.c_uint32), ("signed", ctypes.c_int32), ("smallest", ctypes.c_uint32),
        ("any", ctypes.c_uint32), ("top_bytes", ctypes.c_uint32), ("base", ctypes.c_uint32), ("pairs", ctypes.c_uint32),
        ("equal_low", ctypes.c_uint32), ("equal_rest", ctypes.c_uint32),
    )  # fmt: skip


class _Scratch(threading.local):
    """Reusable planes of one block, per thread."""

    def __init__(self) -> None:
        most = BLOCK_BYTES // 2
        self.codes = np.empty(most, np.uint8)
        self.places = np.empty(_GROUP_WORDS * most // min(LIMITS) + _STRETCH, np.uint32)
        self.values = np.empty(len(self.places), np.uint16)
        self.found = _Found()
        self.digest = ctypes.create_string_buffer(16)
        planes = (self.codes, self.places, self.values)
        self.addresses = (*(_address(plane) for plane in planes), ctypes.addressof(self.found))


def _address(plane: Plane) -> int:
    return int(plane.__array_interface__["data"][0])


_scratch = _Scratch()
_limits = (ctypes.c_size_t * len(LIMITS))(*LIMITS)


def split(words: Plane, half_precision: bool, base: int, low: Plane, rest: Plane, extremes: Extremes | None) -> Codes:
    """As in passes.py."""
    scratch, count, wide = _scratch, len(words), words.itemsize == 4
    escapes = _library.ckpt_split(
        _address(words), wide, count, half_precision, base, _limits, _address(low), _address(rest), *scratch.addresses
    )
    found = scratch.found
    if extremes is not None:
        extremes.add(found.unsigned, found.signed, found.smallest)
    pairs = found.pairs
    return Codes(
        bool(found.top_bytes), found.base, scratch.codes[: count // 2 if pairs else count],
        scratch.places[:escapes] if pairs else None, scratch.values[:escapes], found.equal_low, found.equal_rest,
    )  # fmt: skip


def scan(words: Plane, extremes: Extremes) -> str:
    """As in passes.py."""
    if words.nbytes < _HASHED_LEAST:
        return passes.scan(words, extremes)
    found, digest, size = _scratch.found, _scratch.digest, words.itemsize
    _library.ckpt_scan(
        _address(words), size == 4, len(words), BLOCK_BYTES // size, ctypes.addressof(found), digest
    )  # fmt: skip
    extremes.add(found.unsigned, found.signed, found.smallest)
    return digest.raw.hex()


def read(fd: int, offset: int, into: memoryview) -> tuple[int, str] | None:
    """Read from a file: the number of bytes, which is smaller at its end, and their xxh3-128 if it is not.

    None: there is no library, or the range is too short. Raises OSError.
    """
    if not IS_BUILT or len(into) < _HASHED_LEAST:
        return None
    digest = _scratch.digest
    count = _library.ckpt_read(fd, offset, _address(np.frombuffer(into, np.uint8)), len(into), digest)
    if count < 0:
        raise OSError(-count, os.strerror(-count))
    return count, digest.raw.hex()


def layouts(exchange: int, tensors: Plane) -> tuple[bytes, int] | None:
    """Words that are equal for tensors of equal address, type, device, shape and strides; and a bit for each kind of
    type, see DLDataTypeCode. None: there is no library, or another version of DLPack.

    exchange: the address of a DLPackExchangeAPI. tensors: the addresses of their objects, which are alive. Raises the
    error of one that cannot be exported.
    """
    if not IS_BUILT:
        return None
    words = np.empty(_LAYOUT_WORDS * (1 + len(tensors)), np.int64)
    used = _library.layouts(exchange, _address(tensors), len(tensors), _address(words), len(words))
    return (words[1:used].tobytes(), int(words[0])) if used else None


def move(moves: Plane) -> bool:
    """Copy memory: rows of an address to copy to, one to copy from, and a number of bytes. False: no library."""
    if IS_BUILT:
        _library.ckpt_move(_address(moves), len(moves))
    return IS_BUILT


def differ(moves: Plane, places: int, num_bytes: int) -> list[int] | None:
    """The numbers of rows whose memory differs, in all bytes or, of larger ones, in so many at each of some places.

    None: no library. places: 0 for all bytes.
    """
    if not IS_BUILT:
        return None
    found = np.empty(len(moves), np.int64)
    count = _library.ckpt_differ(_address(moves), len(moves), places, num_bytes, _address(found))
    return list(found[:count].tolist())


class Planes:
    """The compiled code takes addresses, or bytes as they are: an array per plane would cost as much as joining it."""

    def __init__(self, data: Plane) -> None:
        self._data = data  # keeps its memory
        self._address = _address(data)

    def at(self, begin: int, num_bytes: int, kind: Any) -> int:
        """The address of the plane that begins there."""
        return self._address + begin

    def unpacked(self, data: bytes, kind: Any) -> bytes:
        """The plane that a frame was unpacked to."""
        return data


def join(words: int, count: int, block: Codes, low: Any | None, is_mixed: bool, rest: Any, escapes: int) -> None:
    """As in passes.py."""
    if _library.ckpt_join(
        words, low is not None, count, block.top_bytes, block.base, block.places is not None, low, is_mixed,
        rest, block.codes, block.places, block.values, escapes if block.places is not None else 0,
    ):  # fmt: skip
        raise IndexError("an escape is outside of its block")
