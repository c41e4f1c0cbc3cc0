"""The float-split codecs: exponents are entropy-coded, signs and mantissas are not.

The layout is in docs/explanation/format.md. This module writes and reads blocks: headers, planes and their frames. The
loops over words are compiled (fused.py) or, where that was not built, passes of numpy (passes.py). All of them and
zstd release the GIL.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from ckptstore.codecs import fused, passes
from ckptstore.codecs.dtypes import ITEM_BYTES, Extremes, Seen, ignore
from ckptstore.codecs.frames import Buffer, pack, pack_huffman, unpack
from ckptstore.codecs.passes import BLOCK_BYTES, SAMPLE, Codes, Plane
from ckptstore.errors import CorruptObject

SMALL_BLOCK = 1 << 15
"""Fewest words of a block, except the last. Small blocks follow changes of scale sooner, and take longer."""
GROUP = 8
"""The number of words of a block is a multiple of this; other words are stored unchanged at the end of a chunk."""

_HEADER = struct.Struct("<IIIIHBBxxxx")  # words; sizes of low, rest, codes if compressed; escapes; base; mode
_ALIGN = 8
_PAIRS, _TOP_BYTES = 1, 2  # bits of a block's mode
_UPPER_HALF = np.uint32(0xFFFF0000)
_REPEATS = 16  # a plane is searched for repetitions if one lane in N equals the next
_NO_LOW: Plane = np.empty(0, np.uint32)


loops = fused if fused.IS_BUILT else passes
"""The loops over one block; both modules give the same bytes."""


def encode(dtype: str, raw: memoryview, level: int, extremes: Extremes | None = None, seen: Seen = ignore) -> Buffer:
    """Encode one chunk of whole elements. The result may be a few bytes per block longer than `raw`.

    level: 1 compresses exponents, and other planes only if they contain repetitions; above 1 tries everything.
    extremes: gets all words, block by block while they are in the cache. seen: so does it.
    """
    words: Plane = np.frombuffer(raw, f"u{ITEM_BYTES[dtype]}")
    encoded = _encode(dtype, words, level, BLOCK_BYTES // words.itemsize, extremes, seen)
    return encoded if level == 1 else min(encoded, _encode(dtype, words, level, SMALL_BLOCK), key=len)


def _encode(
    dtype: str, words: Plane, level: int, size: int, extremes: Extremes | None = None, seen: Seen = ignore
) -> Buffer:
    whole = len(words) // GROUP * GROUP
    blocks = -(-whole // size)
    out = np.empty(words.nbytes + blocks * (_HEADER.size + 4 * _ALIGN), np.uint8)
    writer = _Writer(dtype, level, out, extremes, seen)
    for start in range(0, whole, size):
        writer.add(words[start : min(start + size, whole)])
    tail = words[whole:].view(np.uint8)
    seen(tail.data)
    if extremes is not None and len(tail):
        passes.find_extremes(words[whole:], extremes)
    end = writer.at + len(tail)
    out[writer.at : end] = tail
    return out[:end].data


def scan(raw: memoryview, extremes: Extremes) -> str:
    """Add the extremes of a chunk that is not encoded. Returns its digest; both pass through the cache once."""
    words: Plane = np.frombuffer(raw, f"u{ITEM_BYTES[extremes.dtype]}")
    found: str = loops.scan(words, extremes)
    return found


class _Writer:
    """Writes blocks in order."""

    def __init__(self, dtype: str, level: int, out: Plane, extremes: Extremes | None, seen: Seen) -> None:
        self._half_precision = dtype == "float16"
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
        low = self._room(2 * count, np.uint32) if words.itemsize == 4 else _NO_LOW
        rest = self._room(count, np.uint16, behind=low.nbytes)
        block = loops.split(words, self._half_precision, self._base, low, rest, self._extremes)
        self._base = block.base
        low_size = self._finish_low(words, low, _repeats(block.equal_low, len(low))) if len(low) else 0
        if low_size:
            moved = self._room(count, np.uint16)
            moved[:] = rest  # numpy copies overlapping memory correctly
            rest = moved
        rest_size = self._finish(rest, _repeats(block.equal_rest, len(rest)))
        mode = _TOP_BYTES if block.top_bytes else 0
        if block.places is not None:
            mode |= _PAIRS
            self._put(block.places.data.cast("B"))
            self._put(block.values.data.cast("B"))
        codes = block.codes
        frame = self._pack(codes, repeats=self._level > 1)
        codes_size = len(frame) if len(frame) < len(codes) else 0
        self._put(frame if codes_size else codes.data)
        _HEADER.pack_into(
            self._out.data, begin, count, low_size, rest_size, codes_size, len(block.values), block.base, mode
        )

    def _room(self, num_bytes: int, kind: Any, behind: int = 0) -> Plane:
        """The output for the next plane, or for the one behind it."""
        return self._out[self.at + behind : self.at + behind + num_bytes].view(kind)

    def _finish_low(self, words: Plane, low: Plane, repeats: bool) -> int:
        """Compress the lower halves if that is promising; returns the compressed size, 0 if they are unchanged."""
        if not repeats and self._level == 1:
            self.at += low.nbytes
            return 0
        mixed = words[: len(low)] & _UPPER_HALF
        np.bitwise_xor(low, mixed, low)
        size = self._finish(low, repeats)
        if not size:
            np.bitwise_xor(low, mixed, low)
        return size

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


def _repeats(equal: int, lanes: int) -> bool:
    """Whether a plane is worth searching for repetitions. equal: sampled lanes that equal the next one."""
    return equal * SAMPLE * _REPEATS > lanes


def decode(dtype: str, stored: memoryview, into: memoryview) -> None:
    """Decode one chunk into `into`. Raises CorruptObject; never writes outside `into`."""
    item = ITEM_BYTES[dtype]
    if len(into) % item:
        raise CorruptObject(f"float-split chunk has a raw size of {len(into)} bytes, which is not whole elements")
    if into.readonly:
        raise ValueError("cannot decode into read-only memory")
    target: Plane = np.frombuffer(into, np.uint8)
    whole = len(target) // (item * GROUP) * item * GROUP
    _Reader(stored, target[:whole], item).read(target[whole:])


class _Reader:
    """Reads a chunk in order. The stored bytes are untrusted."""

    def __init__(self, stored: memoryview, into: Plane, item: int) -> None:
        """into: whole groups of words. item: bytes of a word."""
        data: Plane = np.frombuffer(stored, np.uint8)
        self._stored, self._size, self._at = data.data, len(data), 0
        self._planes, self._into = loops.Planes(data), loops.Planes(into)
        self._words, self._item, self._kind = len(into) // item, item, np.dtype(f"u{item}")

    def read(self, tail: Plane) -> None:
        """Decode all blocks, and the words behind them to `tail`. Raises CorruptObject if bytes are left."""
        start, most = 0, BLOCK_BYTES // self._item
        while start < self._words:
            start += self._read_block(start, min(most, self._words - start))
        begin = self._take(len(tail))
        tail[:] = np.frombuffer(self._stored[begin : self._at], np.uint8)
        if self._at != self._size:
            raise CorruptObject(f"float-split chunk has {self._size - self._at} excess bytes")

    def _read_block(self, start: int, most: int) -> int:
        """Decode one block to the words from `start`; returns how many, at most `most`."""
        header = _HEADER.unpack_from(self._stored, self._take(_HEADER.size))
        count, low_size, rest_size, codes_size, escapes, base, mode = header
        # Tiny blocks would make decoding a chunk take minutes.
        if not min(SMALL_BLOCK, most) <= count <= most or count % GROUP:
            raise CorruptObject(f"float-split chunk has a block of {count} words")
        if mode & ~(_PAIRS | _TOP_BYTES):
            raise CorruptObject(f"float-split chunk has a block of unknown mode {mode}")
        pairs = bool(mode & _PAIRS)
        low = self._plane(2 * count, low_size, np.uint32) if self._item == 4 else None
        rest = self._plane(count, rest_size, np.uint16)
        places, values = self._plane(4 * escapes, 0, np.uint32), self._plane(2 * escapes, 0, np.uint16)
        codes = self._plane(count // 2 if pairs else count, codes_size, np.uint8)
        block = Codes(bool(mode & _TOP_BYTES), base, codes, places if pairs else None, values)
        words = self._into.at(start * self._item, count * self._item, self._kind)
        try:
            loops.join(words, count, block, low, not low_size, rest, escapes)
        except IndexError:
            raise CorruptObject("float-split chunk has an escape outside of its block") from None
        return int(count)

    def _plane(self, num_bytes: int, packed: int, kind: Any) -> Any:
        size = packed or num_bytes
        begin = self._take(size + -size % _ALIGN)
        if packed:
            return self._planes.unpacked(unpack(self._stored[begin : begin + size], num_bytes), kind)
        return self._planes.at(begin, num_bytes, kind)

    def _take(self, num_bytes: int) -> int:
        """Consume the next bytes; returns where they begin. Raises CorruptObject if the chunk ends before them."""
        begin, self._at = self._at, self._at + num_bytes
        if self._at > self._size:
            raise CorruptObject("float-split chunk ends early")
        return begin
