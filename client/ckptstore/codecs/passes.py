"""The loops of float-split over one block, in numpy: passes over planes that stay in the L2 cache.

fused.py has the same loops, compiled, with the same results bit by bit; these run where it was not built. All calls
release the GIL. The layout needs few passes: a lane of a plane holds parts of two words, one from each half of a
block, so masks and shifts of whole lanes split and join words.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ckptstore.codecs.extremes import Extremes

Plane = npt.NDArray[Any]

BLOCK_BYTES = 1 << 19
"""Largest raw size of a block, so that its planes stay in the L2 cache."""
WINDOW = 16
"""Codes that fit into half a byte."""
LIMITS = (1024, 512)
"""One word in N may be outside of the window of the block before; or else of the block's own."""
SAMPLE = 64
"""One word in N is sampled to find the window, and one lane to find repetitions."""
NEEDS_ALIGNED = True
"""Passes over unaligned lanes take several times as long as a copy."""

_LARGEST_POSITIVE = 0x7FFF
_SWAPPED = np.dtype(">u2")
_WORDS_OF_64_BITS = 4
_WITHIN_64_BITS = np.arange(_WORDS_OF_64_BITS)


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


def _lane(value: int, kind: Any = np.uint16) -> Plane:
    """An operand of passes, as a zero-dimensional array: a call with a Python number costs twice as much."""
    return np.array(value, kind)


_SHIFT16, _WORD16, _LOWER_HALF = _lane(16, np.uint32), _lane(1 << 16, np.uint32), _lane(0xFFFF, np.uint32)
_LOWER_NIBBLE, _UPPER_NIBBLE, _UPPER_BYTE = _lane(0x0F), _lane(0xF0), _lane(0xFF00)
_NO_VALUES: Plane = np.empty(0, np.uint16)


class _Fields:
    """The division of 16 bits into a code of 8 bits, which is compressed, and the other 8 bits, which are not."""

    def __init__(self, shift: int, rest: int) -> None:
        self.shift = _lane(shift)
        """Number of bits below the code."""
        self.rest = _lane(rest)
        self.unit = _lane(1 << shift)
        self.field = _lane(0xFF << shift)
        self.outside = _lane((0xFF - (WINDOW - 1)) << shift)
        # For pairs: the second word's code is in the upper half of a byte.
        self.pair_field = _lane((WINDOW - 1) << shift)
        self.pair_shift = _lane(shift - 4)
        self.pair_unit = _lane(1 << (shift - 4))
        self.up = _lane(8 - shift)


_EXPONENT = _Fields(7, 0x807F)
_TOP_BYTE = _Fields(8, 0x00FF)


class _Scratch(threading.local):
    """Reusable planes of one block, per thread."""

    def __init__(self) -> None:
        most = BLOCK_BYTES // 2
        self.high = np.empty(BLOCK_BYTES // 4, np.uint16)
        self.words = np.empty(most, np.uint16)
        self.lanes = np.empty(most // 2, np.uint16)
        self.more = np.empty(most // 2, np.uint16)


_scratch = _Scratch()


def split(words: Plane, half_precision: bool, base: int, low: Plane, rest: Plane, extremes: Extremes | None) -> Codes:
    """Split a block into `low`, which is empty for 16-bit words, `rest`, and codes, valid until the next call here.

    base: that of the block before. half_precision: the words are float16.
    """
    high = _split_wide(words, low) if len(low) else words
    # Without signs, the exponent's lowest bit takes their place: cheaper than coding seven bits of eight.
    highest = int(high.max())
    fields = _EXPONENT if highest > _LARGEST_POSITIVE and not half_precision else _TOP_BYTE
    if extremes is not None:
        survey(words, extremes)
    places, base = (None, base) if half_precision else _window(high, base, fields)
    top_bytes = fields is _TOP_BYTE
    lanes = high if places is None else _scratch.words[: len(high)]
    _split_rest(lanes, fields, rest)
    half = len(low)
    equal = _equal(words[:half], words[half:]) if half else 0, _equal(rest)
    if places is None:
        return Codes(top_bytes, base, _split_codes(high, fields), None, _NO_VALUES, *equal)
    return Codes(top_bytes, base, _split_pairs(lanes, fields), places.astype(np.uint32), high[places], *equal)


def survey(words: Plane, extremes: Extremes) -> None:
    """Add the extremes of a block that is not split."""
    signed = words.view(f"i{words.itemsize}")
    extremes.add(int(words.max()), int(signed.max()), int(words.min()))


class Planes:
    """Planes in the bytes of a chunk, as arrays."""

    def __init__(self, data: Plane) -> None:
        self._data = data

    def at(self, begin: int, num_bytes: int, kind: Any) -> Plane:
        """A view of these bytes."""
        return self._data[begin : begin + num_bytes].view(kind)

    def unpacked(self, data: bytes, kind: Any) -> Plane:
        """The plane that a frame was unpacked to."""
        return np.frombuffer(data, kind)


planes = Planes


def join(words: Plane, count: int, block: Codes, low: Plane | None, is_mixed: bool, rest: Plane, escapes: int) -> None:
    """Join a block. low: None for 16-bit words. escapes: their number, for loops that get addresses.

    Raises IndexError if an escape is outside of the block.
    """
    fields = _TOP_BYTE if block.top_bytes else _EXPONENT
    high, spare, half = words, _scratch.lanes, count // 2
    if low is not None:  # additional planes would not fit into the cache
        spare, high = words[:half].view(np.uint16), words[half:].view(np.uint16)
    if block.places is None:
        _join_codes(block.codes.view(np.uint16), rest, fields, high, spare)
    else:
        _join_pairs(block.codes, block.base, rest, fields, high, spare)
        high[block.places] = block.values
    if low is not None:
        _join_wide(low, is_mixed, words)


def _split_wide(words: Plane, low: Plane) -> Plane:
    """The upper halves of words; writes the lower halves to `low`. Both alternate between the halves of the block.

    The lower halves of the second half are mixed with the upper halves of the first, so no mask is needed.
    """
    half = len(low)
    first, second, high = words[:half], words[half:], _scratch.high[: 2 * half]
    joined = high.view(np.uint32)
    np.multiply(second, _WORD16, low)
    np.bitwise_xor(low, first, low)
    np.right_shift(low, _SHIFT16, joined)
    np.bitwise_xor(joined, second, joined)
    return high


def _join_wide(low: Plane, is_mixed: bool, words: Plane) -> None:
    """Join words in place. The second half of `words` holds the upper halves, and is completed first."""
    first, second = words[: len(low)], words[len(low) :]
    if not is_mixed:
        low = low ^ second * _WORD16
    np.right_shift(low, _SHIFT16, first)
    np.bitwise_xor(second, first, second)
    np.multiply(second, _WORD16, first)
    np.bitwise_xor(first, low, first)


def _window(high: Plane, base: int, fields: _Fields) -> tuple[Plane | None, int]:
    """Make codes relative to a window, in scratch memory; returns the escapes, or None if there are too many, and its
    base.
    """
    for limit in LIMITS:
        lanes, outside = _relative(high, base, fields)
        groups = np.flatnonzero(outside.view(np.uint64) != 0)
        if len(groups) * limit <= len(high):
            suspects = (groups[:, None] * _WORDS_OF_64_BITS + _WITHIN_64_BITS).ravel()
            suspects = np.concatenate((suspects, suspects + len(outside)))
            escapes: Plane = suspects[lanes[suspects] & fields.outside != 0]
            lanes[escapes] = high[escapes] & fields.rest
            return escapes, base
        if limit == LIMITS[0]:
            base = _densest(high, fields)
    return None, base


def _densest(high: Plane, fields: _Fields) -> int:
    """The begin of the window that contains most codes of a sample."""
    sample = (high[::SAMPLE] & fields.field) >> fields.shift
    seen = np.concatenate(([0], np.cumsum(np.bincount(sample, minlength=256))))
    return int(np.argmax(seen[WINDOW:] - seen[:-WINDOW]))


def _equal(plane: Plane, second: Plane | None = None) -> int:
    """How many sampled lanes equal the next one. second: the lanes are the lower halves of words of both, in pairs."""
    differences: Plane = plane[:-1:SAMPLE] ^ plane[1::SAMPLE]
    if second is not None:
        differences = (differences | second[:-1:SAMPLE] ^ second[1::SAMPLE]) & _LOWER_HALF
    return len(differences) - int(np.count_nonzero(differences))


def _relative(high: Plane, base: int, fields: _Fields) -> tuple[Plane, Plane]:
    """Words minus the first code of the window; and for each pair of words, nonzero bits if one is outside."""
    half = len(high) // 2
    lanes, outside = _scratch.words[: len(high)], _scratch.lanes[:half]
    np.subtract(high, _lane(base << int(fields.shift)), lanes)
    np.bitwise_or(lanes[:half], lanes[half:], outside)
    np.bitwise_and(outside, fields.outside, outside)
    return lanes, outside


def _split_rest(words: Plane, fields: _Fields, rest: Plane) -> None:
    half = len(rest)
    lanes = _scratch.lanes[:half]
    np.bitwise_and(words[half:], fields.rest, lanes)
    np.copyto(rest, lanes.view(_SWAPPED))
    np.bitwise_and(words[:half], fields.rest, lanes)
    np.bitwise_or(rest, lanes, rest)


def _join_rest(rest: Plane, fields: _Fields, high: Plane, spare: Plane) -> None:
    half = len(rest)
    lanes, first, second = spare[:half], high[:half], high[half:]
    np.bitwise_and(rest, fields.rest, lanes)
    np.bitwise_or(first, lanes, first)
    np.copyto(lanes, rest.view(_SWAPPED))
    np.bitwise_and(lanes, fields.rest, lanes)
    np.bitwise_or(second, lanes, second)


def _split_pairs(words: Plane, fields: _Fields) -> Plane:
    half = len(words) // 2
    codes, second = _scratch.lanes[:half], _scratch.more[:half]
    np.right_shift(words[:half], fields.shift, codes)
    np.bitwise_and(codes, _LOWER_NIBBLE, codes)
    np.right_shift(words[half:], fields.pair_shift, second)
    np.bitwise_and(second, _UPPER_NIBBLE, second)
    np.bitwise_or(codes, second, codes)
    return codes.astype(np.uint8)


def _join_pairs(codes: Plane, base: int, rest: Plane, fields: _Fields, high: Plane, spare: Plane) -> None:
    first, second = high[: len(rest)], high[len(rest) :]
    np.copyto(first, codes)
    np.add(first, _lane(base << 4), first)  # to the second code, which has no bits above it
    np.multiply(first, fields.pair_unit, second)
    np.bitwise_and(second, fields.field, second)
    np.multiply(first, fields.unit, first)
    np.bitwise_and(first, fields.pair_field, first)
    np.add(first, _lane(base << int(fields.shift)), first)
    _join_rest(rest, fields, high, spare)


def _split_codes(words: Plane, fields: _Fields) -> Plane:
    half = len(words) // 2
    codes, second = _scratch.lanes[:half], _scratch.more[:half]
    np.bitwise_and(words[:half], fields.field, codes)
    np.right_shift(codes, fields.shift, codes)
    np.left_shift(words[half:], fields.up, second)
    np.bitwise_and(second, _UPPER_BYTE, second)
    np.bitwise_or(codes, second, codes)
    return codes.view(np.uint8)


def _join_codes(codes: Plane, rest: Plane, fields: _Fields, high: Plane, spare: Plane) -> None:
    half = len(rest)
    first, second = high[:half], high[half:]
    np.multiply(codes, fields.unit, first)
    np.bitwise_and(first, fields.field, first)
    np.right_shift(codes, fields.up, second)
    np.bitwise_and(second, fields.field, second)
    _join_rest(rest, fields, high, spare)
