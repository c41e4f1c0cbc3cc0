"""Delta: a chunk as its differences from a base, an earlier chunk of the same size. Lossless for every type. Pure.

Words of floats are ordered by magnitude, so that a small update changes a word by a small number, and few words of a
16-bit type change at all. Either these are listed, with the gaps between them, or the differences of all words are
stored; both byte plane by byte plane, or a list in a Rice code, which needs no tables. The digest of the decoded bytes
comes first: another base, or damaged bytes, cannot become wrong weights, and equal deltas of different bases differ.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import xxhash

from ckptstore.codecs.frames import Buffer, pack, pack_huffman, unpack
from ckptstore.errors import CorruptObject

DELTA = "delta"
"""The codec's name in documents."""

_HEAD = struct.Struct("<16sII")
"""Digest of the chunk, bytes of a word, and the number of differences."""
_SIZE = struct.Struct("<I")
_WIDTHS = (1, 2, 4, 8)
_GAP = np.dtype("<u4")
_PLANES = 255
"""In place of the number of low bits."""
_LN2 = 0.693


def encode(raw: Buffer, base: Buffer, item: int) -> bytes:
    """The chunk as differences from the base, which has the same size. item: bytes of an element."""
    width = min(item, _WIDTHS[-1])
    new, old = (np.frombuffer(data, f"<u{width}") for data in (raw, base))
    change = new - old
    change = (change << 1) ^ (np.zeros(1, change.dtype) - (change >> (8 * width - 1)))  # small numbers of either sign
    found = np.flatnonzero(change)
    parts = [(len(change), _planes(change))]
    if len(found) < len(change):
        gaps = (np.diff(found, prepend=-1) - 1).astype(_GAP)
        parts.append((len(found), _packed(gaps) + _packed(change[found] - 1)))
    count, data = min(parts, key=lambda part: len(part[1]))
    return _HEAD.pack(xxhash.xxh3_128_digest(raw), width, count) + data


def _packed(words: Any) -> bytes:
    """The smaller of a Rice code of the words and their planes; before it, how many low bits of each word are apart.

    The code has the rest of each word in unary, then the low bits of all, least significant first.
    """
    planes = _planes(words)
    low = max(1, int(words.sum(dtype=float) * _LN2 / (len(words) + 1))).bit_length() - 1
    ends = np.cumsum((words >> low) + np.uint64(1), dtype=np.int64)
    bits = np.zeros(ends.max(initial=0), np.uint8)
    if len(bits) + low * len(words) >= 8 * len(planes):
        return planes
    bits[ends - 1] = 1
    rest = np.packbits(words[:, None] >> np.arange(low, dtype=words.dtype) & 1)
    unary = np.packbits(bits).tobytes()
    return bytes([low]) + _SIZE.pack(len(unary)) + unary + rest.tobytes()


def _planes(words: Any) -> bytes:
    """For each byte of the words the smaller of two frames, behind its size."""
    planes = (plane.tobytes() for plane in words.view(np.uint8).reshape(-1, words.itemsize).T)
    frames = [min(pack_huffman(plane), pack(plane, 3), key=len) for plane in planes]
    return bytes([_PLANES]) + b"".join(_SIZE.pack(len(frame)) + frame for frame in frames)


def decode(stored: memoryview, into: memoryview) -> None:
    """Turn the base, which `into` holds, into the chunk. Raises CorruptObject; `into` then holds anything."""
    try:
        digest, width, count = _HEAD.unpack_from(stored)
        words = np.frombuffer(into, f"<u{width}" if width in _WIDTHS else "")
        found: Any = slice(None)
        rest = stored[_HEAD.size :]
        if count > len(words):
            raise ValueError("more differences than words")
        if count < len(words):
            gaps, rest = _unpacked(rest, count, _GAP.itemsize)
            found = np.cumsum(gaps + np.int64(1)) - 1
        change, rest = _unpacked(rest, count, width)
        change += count < len(words)  # in a list none is 0
        words[found] += (change >> 1) ^ (np.zeros(1, change.dtype) - (change & 1))
    except (struct.error, TypeError, ValueError, IndexError) as error:
        raise CorruptObject(f"a delta is not valid: {error}") from error
    if len(rest) or xxhash.xxh3_128_digest(into) != digest:
        raise CorruptObject("a delta does not give the chunk that it was made of")


def _unpacked(stored: memoryview, count: int, width: int) -> tuple[Any, memoryview]:
    """So many words, and what follows them."""
    low, stored = stored[0], stored[1:]
    if low < _PLANES:
        (size,) = _SIZE.unpack_from(stored)
        bits = np.unpackbits(np.frombuffer(stored, np.uint8, size, _SIZE.size))
        end = _SIZE.size + size + -(-count * low // 8)
        rest = np.unpackbits(np.frombuffer(stored[_SIZE.size + size : end], np.uint8))[: count * low]
        if bits.sum() != count:
            raise ValueError("not as many numbers as differences")
        powers = np.uint64(1) << np.arange(low, dtype=np.uint64)
        high = (np.diff(np.flatnonzero(bits), prepend=-1) - 1).astype(np.uint64) << np.uint64(low)
        return (high + rest.reshape(count, low) @ powers).astype(f"<u{width}"), stored[end:]
    planes = []
    for _ in range(width):
        (size,) = _SIZE.unpack_from(stored)
        planes.append(np.frombuffer(unpack(stored[_SIZE.size : _SIZE.size + size], count), np.uint8))
        stored = stored[_SIZE.size + size :]
    return np.stack(planes, 1).view(f"<u{width}")[:, 0], stored
