"""The loops of float-split over one block, in numpy: the plain reference of fused.c, with the same results bit by bit.

They run where fused.c was not built, and take several times as long. A block is divided into halves: a lane of a plane
holds parts of two words, one of each half.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from ckptstore.codecs.dtypes import Extremes

Plane = npt.NDArray[Any]

BLOCK_BYTES = 1 << 19
"""Largest raw size of a block, so that its planes stay in the L2 cache."""
WINDOW = 16
"""Codes that fit into half a byte."""
LIMITS = (1024, 512)
"""One word in N may be outside of the window of the block before; or else of the block's own."""
SAMPLE = 64
"""One word in N is sampled to find the window, and one lane to find repetitions."""

_SIGN = 0x8000
_GROUP_LANES = 4
"""Escapes in so many lanes of each half count as one."""
_NO_VALUES: Plane = np.empty(0, np.uint16)


class Codes(NamedTuple):
    """The planes of a block that depend on its numbers, and how they divide 16 bits.

    When a block is joined, its planes are as `Planes` returns them.
    """

    top_bytes: bool
    """The code is the upper byte; otherwise the exponent."""
    base: int
    """The first code of the window."""
    codes: Plane
    """Two codes in a byte, relative to `base`; without a window codes of 8 bits, in interleaving order."""
    places: Plane | None
    """uint32: the escapes, in order; None: there is no window."""
    values: Plane
    """uint16: their 16 bits."""
    equal_low: int = 0
    """The number of sampled lanes that equal the next one, in the plane of lower halves."""
    equal_rest: int = 0
    """The same in `rest`."""


class _Fields(NamedTuple):
    """The division of 16 bits into a code of 8 bits, which is compressed, and the other 8 bits, which are not."""

    shift: int
    """Number of bits below the code."""
    rest: int
    """Mask of the other bits."""

    def code(self, high: Plane) -> Plane:
        """The codes of some words."""
        return high >> self.shift & 0xFF


_EXPONENT, _TOP_BYTE = _Fields(7, 0x807F), _Fields(8, 0x00FF)


def split(words: Plane, half_precision: bool, base: int, low: Plane, rest: Plane, extremes: Extremes | None) -> Codes:
    """Split a block into `low`, which is empty for 16-bit words, `rest`, and codes, valid until the next call here.

    base: that of the block before. half_precision: the words are float16.
    """
    if extremes is not None:
        find_extremes(words, extremes)
    high, equal_low = words, 0
    if len(low):
        first, second = np.split(words, 2)
        # The lower halves of the second half are mixed with the upper halves of the first.
        low[:] = first ^ second << 16
        high = np.column_stack((first >> 16, second >> 16)).astype(np.uint16).ravel()
        equal_low = _equal((first & 0xFFFF) | second << 16)
    # Without signs, the exponent's lowest bit takes their place: cheaper than coding seven bits of eight.
    fields = _EXPONENT if high.max() >= _SIGN and not half_precision else _TOP_BYTE
    upper, lower = np.split(high & fields.rest, 2)
    rest[:] = upper | lower.byteswap()
    places = None
    if not half_precision:
        base, places = _window(high, base, fields)
    if places is None:
        first, second = np.split(fields.code(high), 2)
        codes = (first | second << 8).view(np.uint8)
        return Codes(fields is _TOP_BYTE, base, codes, None, _NO_VALUES, equal_low, _equal(rest))
    relative = fields.code(high) - base
    relative[places] = 0
    first, second = np.split(relative, 2)
    codes = (first | second << 4).astype(np.uint8)
    return Codes(
        fields is _TOP_BYTE, base, codes, places.astype(np.uint32), high[places], equal_low, _equal(rest)
    )  # fmt: skip


def find_extremes(words: Plane, extremes: Extremes) -> None:
    """Add the extremes of a block that is not split."""
    signed = words.view(f"i{words.itemsize}")
    extremes.add(int(words.max()), int(signed.max()), int(words.min()))


def scan(words: Plane, extremes: Extremes) -> str:
    """Add the extremes of a chunk that is not split. Returns its xxh3-128."""
    seen, size = xxhash.xxh3_128(), BLOCK_BYTES // words.itemsize
    for start in range(0, len(words), size):
        block = words[start : start + size]
        seen.update(block.data)
        find_extremes(block, extremes)
    return seen.hexdigest()


class Planes(NamedTuple):
    """Planes in the bytes of a chunk, as arrays."""

    data: Plane

    def at(self, begin: int, num_bytes: int, kind: Any) -> Plane:
        """A view of these bytes."""
        return self.data[begin : begin + num_bytes].view(kind)

    def unpacked(self, data: bytes, kind: Any) -> Plane:
        """The plane that a frame was unpacked to."""
        return np.frombuffer(data, kind)


def join(words: Plane, count: int, block: Codes, low: Plane | None, is_mixed: bool, rest: Plane, escapes: int) -> None:
    """Join a block. low: None for 16-bit words. escapes: their number, for loops that get addresses.

    Raises IndexError if an escape is outside of the block.
    """
    fields = _TOP_BYTE if block.top_bytes else _EXPONENT
    if block.places is None:
        codes = block.codes.view(np.uint16)
        first, second = codes & 0xFF, codes >> 8
    else:
        codes = block.codes.astype(np.uint16)
        first, second = (codes & 0x0F) + block.base, (codes >> 4) + block.base
    # A damaged block has codes of more than 8 bits: those of the first half reach into the sign.
    first, second = first << fields.shift, second << fields.shift & 0xFF << fields.shift
    high = np.concatenate((first | rest & fields.rest, second | rest.byteswap() & fields.rest)).astype(np.uint16)
    if block.places is not None:
        high[block.places] = block.values
    if low is None:
        words[:] = high
        return
    first, second = high[0::2].astype(np.uint32), high[1::2].astype(np.uint32)
    lower = low >> 16 ^ first if is_mixed else low >> 16
    words[: count // 2] = first << 16 | low & 0xFFFF
    words[count // 2 :] = second << 16 | lower


def _window(high: Plane, base: int, fields: _Fields) -> tuple[int, Plane | None]:
    """The base of the window, and the words outside of it; None: these are too many."""
    for limit in LIMITS:
        outside = (high - np.uint16(base << fields.shift)) >> fields.shift & 0xFF >= WINDOW
        groups = outside.reshape(2, -1, _GROUP_LANES).any(axis=(0, 2))
        if np.count_nonzero(groups) * limit <= len(high):
            return base, np.flatnonzero(outside)
        if limit == LIMITS[0]:
            base = _densest(fields.code(high[::SAMPLE]))
    return base, None


def _densest(codes: Plane) -> int:
    """The begin of the window that contains most codes of a sample."""
    seen = np.concatenate(([0], np.cumsum(np.bincount(codes, minlength=256))))
    return int(np.argmax(seen[WINDOW:] - seen[:-WINDOW]))


def _equal(plane: Plane) -> int:
    """How many sampled lanes equal the next one."""
    return int(np.count_nonzero(plane[:-1:SAMPLE] == plane[1::SAMPLE]))
