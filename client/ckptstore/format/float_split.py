"""The float-split codecs: exponents are entropy-coded, signs and mantissas are not.

The layout is in docs/explanation/format.md. All work is numpy passes over planes that stay in the L2 cache, and calls
of zstd; both release the GIL. The layout needs few passes: a lane of a plane holds parts of two words, one from each
half of a block, so masks and shifts of whole lanes split and join words.
"""

from __future__ import annotations

import struct
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptstore.errors import CorruptObject
from ckptstore.format.extremes import BlockExtremes, Seen, ignore
from ckptstore.format.frames import Buffer, pack, pack_huffman, unpack

Plane = npt.NDArray[Any]

BLOCK_BYTES = 1 << 19
"""Largest raw size of a block, so that its planes stay in the L2 cache."""
SMALL_BLOCK = 1 << 15
"""Fewest words of a block, except the last. Small blocks follow changes of scale sooner, and take longer."""
GROUP = 8
"""The number of words of a block is a multiple of this; other words are stored unchanged at the end of a chunk."""

_HEADER = struct.Struct("<IIIIHBBxxxx")  # words; sizes of low, rest, codes if compressed; escapes; base; mode
_ALIGN = 8
_LARGEST_POSITIVE = 0x7FFF
_SWAPPED = np.dtype(">u2")
_PAIRS, _TOP_BYTES = 1, 2  # bits of a block's mode
_WINDOW = 16  # codes that fit into half a byte
_WORDS_OF_64_BITS = 4
_WITHIN_64_BITS = np.arange(_WORDS_OF_64_BITS)
_FEW_ESCAPES, _MOST_ESCAPES = 1024, 512  # one word in N may be outside the last block's window, or the block's own
_SAMPLE = 64  # one word in N is sampled to find the window
_REPEATS = 16  # a plane is searched for repetitions if one lane in N equals the next


def _lane(value: int, kind: Any = np.uint16) -> Plane:
    """An operand of passes, as a zero-dimensional array: a call with a Python number costs twice as much."""
    return np.array(value, kind)


_SHIFT16, _WORD16 = _lane(16, np.uint32), _lane(1 << 16, np.uint32)
_LOWER_NIBBLE, _UPPER_NIBBLE, _UPPER_BYTE = _lane(0x0F), _lane(0xF0), _lane(0xFF00)


class _Fields:
    """The division of 16 bits into a code of 8 bits, which is compressed, and the other 8 bits, which are not."""

    def __init__(self, shift: int, rest: int) -> None:
        self.shift = _lane(shift)
        """Number of bits below the code."""
        self.rest = _lane(rest)
        self.unit = _lane(1 << shift)
        self.field = _lane(0xFF << shift)
        self.outside = _lane((0xFF - (_WINDOW - 1)) << shift)
        # For pairs: the second word's code is in the upper half of a byte.
        self.pair_field = _lane((_WINDOW - 1) << shift)
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


def encode(
    dtype: str, raw: memoryview, level: int, extremes: BlockExtremes | None = None, seen: Seen = ignore
) -> Buffer:
    """Encode one chunk of whole elements. The result may be a few bytes per block longer than `raw`.

    level: 1 compresses exponents, and other planes only if they contain repetitions; above 1 tries everything.
    extremes: gets all blocks of BLOCK_BYTES, in order, while they are in the cache. seen: so does it, and the rest.
    """
    words: Plane = np.frombuffer(raw, np.uint32 if dtype == "float32" else np.uint16)
    encoded = _encode(dtype, words, level, BLOCK_BYTES // words.itemsize, extremes, seen)
    return encoded if level == 1 else min(encoded, _encode(dtype, words, level, SMALL_BLOCK), key=len)


def _encode(
    dtype: str, words: Plane, level: int, size: int, extremes: BlockExtremes | None = None, seen: Seen = ignore
) -> Buffer:
    whole = len(words) // GROUP * GROUP
    blocks = -(-whole // size)
    out = np.empty(words.nbytes + blocks * (_HEADER.size + 4 * _ALIGN), np.uint8)
    writer = _Writer(dtype, level, out, extremes, seen)
    for start in range(0, whole, size):
        writer.add(words[start : min(start + size, whole)])
    tail = words[whole:].view(np.uint8)
    seen(tail.data)
    end = writer.at + len(tail)
    out[writer.at : end] = tail
    return out[:end].data


class _Writer:
    """Writes blocks in order."""

    def __init__(self, dtype: str, level: int, out: Plane, extremes: BlockExtremes | None, seen: Seen) -> None:
        self._fields = _TOP_BYTE if dtype == "float16" else _EXPONENT
        self._level = level
        self._out = out
        self._extremes, self._seen = extremes, seen
        self._base = 0
        self.at = 0

    def add(self, words: Plane) -> None:
        """Write one block."""
        self._seen(words.data)
        count, begin = len(words), self.at
        self.at += _HEADER.size
        high, low_size = self._split(words) if words.itemsize == 4 else (words, 0)
        # Without signs, the exponent's lowest bit takes their place: cheaper than coding seven bits of eight.
        highest = int(high.max())
        fields = self._fields if highest > _LARGEST_POSITIVE else _TOP_BYTE
        if self._extremes is not None:
            self._extremes.add(words, high, highest)
        escapes = self._window(high, fields) if self._fields is _EXPONENT else None
        lanes = high if escapes is None else _scratch.words[:count]
        rest = self._room(count, np.uint16)
        _split_rest(lanes, fields, rest)
        rest_size = self._finish(rest, _repeats(rest))
        codes = _split_codes(lanes, fields) if escapes is None else _split_pairs(lanes, fields)
        mode = _TOP_BYTES if fields is _TOP_BYTE else 0
        if escapes is not None:
            mode |= _PAIRS
            self._put(escapes.astype(np.uint32).data.cast("B"))
            self._put(high[escapes].data.cast("B"))
        frame = self._pack(codes, repeats=self._level > 1)
        codes_size = len(frame) if len(frame) < len(codes) else 0
        self._put(frame if codes_size else codes.data)
        num_escapes = 0 if escapes is None else len(escapes)
        _HEADER.pack_into(self._out.data, begin, count, low_size, rest_size, codes_size, num_escapes, self._base, mode)

    def _room(self, num_bytes: int, kind: Any) -> Plane:
        """The output for the next plane."""
        return self._out[self.at : self.at + num_bytes].view(kind)

    def _split(self, words: Plane) -> tuple[Plane, int]:
        """Write the lower halves of words; returns the upper halves and the compressed size."""
        low = self._room(2 * len(words), np.uint32)
        high = _split_wide(words, low)
        repeats = _repeats(low, high.view(np.uint32))
        if not repeats and self._level == 1:
            self.at += low.nbytes
            return high, 0
        mixed = high.view(np.uint32) * _WORD16
        np.bitwise_xor(low, mixed, low)
        size = self._finish(low, repeats)
        if not size:
            np.bitwise_xor(low, mixed, low)
        return high, size

    def _finish(self, plane: Plane, repeats: bool) -> int:
        """Compress a plane in place if that is promising; returns the compressed size, 0 if it is unchanged."""
        if repeats or self._level > 1:
            frame = self._pack(plane, repeats)
            if len(frame) < plane.nbytes - _ALIGN:
                self._put(frame)
                return len(frame)
        self.at += plane.nbytes
        return 0

    def _pack(self, plane: Plane, repeats: bool) -> bytes:
        frames: list[bytes] = [pack_huffman(plane.data), *([pack(plane.data, self._level)] if repeats else ())]
        return min(frames, key=len)

    def _put(self, data: Buffer) -> None:
        end = self.at + len(data)
        self._out[self.at : end] = np.frombuffer(data, np.uint8)
        self.at = end + -end % _ALIGN
        self._out[end : self.at] = 0

    def _window(self, high: Plane, fields: _Fields) -> Plane | None:
        """Make codes relative to a window, in scratch memory; returns the escapes, or None if there are too many."""
        for limit in (_FEW_ESCAPES, _MOST_ESCAPES):
            lanes, outside = _relative(high, self._base, fields)
            groups = np.flatnonzero(outside.view(np.uint64) != 0)
            if len(groups) * limit <= len(high):
                suspects = (groups[:, None] * _WORDS_OF_64_BITS + _WITHIN_64_BITS).ravel()
                suspects = np.concatenate((suspects, suspects + len(outside)))
                escapes: Plane = suspects[lanes[suspects] & fields.outside != 0]
                lanes[escapes] = high[escapes] & fields.rest
                return escapes
            if limit == _FEW_ESCAPES:
                self._base = _densest(high, fields)
        return None


def _repeats(plane: Plane, mixed: Plane | None = None) -> bool:
    """Whether a sample shows that a plane is worth searching for repetitions. mixed: the plane mixed into it."""
    differences: Plane = plane[:-1:_SAMPLE] ^ plane[1::_SAMPLE]
    if mixed is not None:
        differences = differences ^ (mixed[:-1:_SAMPLE] ^ mixed[1::_SAMPLE]) * _WORD16
    equal = len(differences) - np.count_nonzero(differences)
    return bool(equal * _SAMPLE * _REPEATS > len(plane))


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


def _relative(high: Plane, base: int, fields: _Fields) -> tuple[Plane, Plane]:
    """Words minus the first code of the window; and for each pair of words, nonzero bits if one is outside."""
    half = len(high) // 2
    lanes, outside = _scratch.words[: len(high)], _scratch.lanes[:half]
    np.subtract(high, _lane(base << int(fields.shift)), lanes)
    np.bitwise_or(lanes[:half], lanes[half:], outside)
    np.bitwise_and(outside, fields.outside, outside)
    return lanes, outside


def _densest(high: Plane, fields: _Fields) -> int:
    """The begin of the window that contains most codes of a sample."""
    sample = (high[::_SAMPLE] & fields.field) >> fields.shift
    seen = np.concatenate(([0], np.cumsum(np.bincount(sample, minlength=256))))
    return int(np.argmax(seen[_WINDOW:] - seen[:-_WINDOW]))


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


def decode(dtype: str, stored: memoryview, into: memoryview) -> None:
    """Decode one chunk into `into`. Raises CorruptObject; never writes outside `into`."""
    kind: Any = np.uint32 if dtype == "float32" else np.uint16
    if len(into) % np.dtype(kind).itemsize:
        raise CorruptObject(f"float-split chunk has a raw size of {len(into)} bytes, which is not whole elements")
    words: Plane = np.frombuffer(into, kind)
    whole, most = len(words) // GROUP * GROUP, BLOCK_BYTES // words.itemsize
    reader = _Reader(stored)
    start = 0
    while start < whole:
        start += reader.next(words[start : min(start + most, whole)])
    tail = words[whole:].view(np.uint8)
    tail[:] = reader.take(len(tail))
    reader.finish()


class _Reader:
    """Reads blocks in order. The stored bytes are untrusted."""

    def __init__(self, stored: memoryview) -> None:
        plane: Plane = np.frombuffer(stored, np.uint8)
        # Passes over unaligned lanes take several times as long as a copy.
        self._stored = plane if plane.ctypes.data % _ALIGN == 0 else plane.copy()
        self._size = len(plane)
        self._at = 0

    def next(self, words: Plane) -> int:
        """Decode one block to the beginning of `words`; returns its number of words."""
        header = _HEADER.unpack(self.take(_HEADER.size).data)
        count, low_size, rest_size, codes_size, num_escapes, base, mode = header
        # Tiny blocks would make decoding a chunk take minutes.
        if not min(SMALL_BLOCK, len(words)) <= count <= len(words) or count % GROUP:
            raise CorruptObject(f"float-split chunk has a block of {count} words")
        if mode & ~(_PAIRS | _TOP_BYTES):
            raise CorruptObject(f"float-split chunk has a block of unknown mode {mode}")
        words = words[:count]
        wide, pairs = words.itemsize == 4, bool(mode & _PAIRS)
        fields = _TOP_BYTE if mode & _TOP_BYTES else _EXPONENT
        low = self._plane(2 * count, low_size, np.uint32) if wide else None
        rest = self._plane(count, rest_size, np.uint16)
        escapes, escaped = self._plane(4 * num_escapes, 0, np.uint32), self._plane(2 * num_escapes, 0, np.uint16)
        high, spare = words, _scratch.lanes
        if wide:  # additional planes would not fit into the cache
            spare, high = words[: count // 2].view(np.uint16), words[count // 2 :].view(np.uint16)
        if pairs:
            codes = self._plane(count // 2, codes_size, np.uint8)
            _join_pairs(codes, base, rest, fields, high, spare)
            self._restore(escapes, escaped, high)
        else:
            _join_codes(self._plane(count, codes_size, np.uint16), rest, fields, high, spare)
        if low is not None:
            _join_wide(low, not low_size, words)
        return int(count)

    def _restore(self, escapes: Plane, escaped: Plane, high: Plane) -> None:
        try:
            high[escapes] = escaped
        except IndexError:
            raise CorruptObject("float-split chunk has an escape outside of its block") from None

    def take(self, num_bytes: int) -> Plane:
        """The next bytes."""
        begin, self._at = self._at, self._at + num_bytes
        if self._at > self._size:
            raise CorruptObject("float-split chunk ends early")
        return self._stored[begin : self._at]

    def finish(self) -> None:
        """Raises CorruptObject if bytes are left."""
        if self._at != self._size:
            raise CorruptObject(f"float-split chunk has {self._size - self._at} excess bytes")

    def _plane(self, num_bytes: int, packed: int, kind: Any) -> Plane:
        size = packed or num_bytes
        stored = self.take(size + -size % _ALIGN)[:size]
        return np.frombuffer(unpack(stored.data, num_bytes), kind) if packed else stored.view(kind)
