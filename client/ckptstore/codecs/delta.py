"""Delta: a chunk as its differences from a base, an earlier chunk of the same size. Lossless for every type. Pure.

Words of floats are ordered by magnitude, so that a small update changes a word by a small number, and few words of a
16-bit type change at all. The smaller a word is, the more often it changes, and by more: so there are four lists of
those that change, one of all words and each of the others of the words below a magnitude in the base. A list has the
gaps before these words, and their differences, in Rice codes. The digest of the decoded bytes comes first: another
base, or damaged bytes, cannot become wrong weights, and equal deltas of different bases differ.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import xxhash
from zstandard import ZstdError, frame_content_size

from ckptstore.codecs.frames import Buffer, pack_huffman, unpack
from ckptstore.errors import CorruptObject

DELTA = "delta"
"""The codec's name in documents."""

_HEAD = struct.Struct("<16sB")
"""Digest of the chunk, and bytes of a word."""
_SIZE = struct.Struct("<I")
_CODE = struct.Struct("<BI")
"""How many low bits of each number are apart, and the bytes of what remains of them."""
_FRAME = 128
"""Added to the number of bits: what remains is in a frame."""
_WIDTHS = (1, 2, 4, 8)
_LISTS = 4
_LN2 = 0.693


def encode(raw: Buffer, base: Buffer, item: int) -> bytes:
    """The chunk as differences from the base, which has the same size. item: bytes of an element."""
    width = min(item, _WIDTHS[-1])
    new, old = (np.frombuffer(data, f"<u{width}") for data in (raw, base))
    change = new - old
    change = (change << 1) ^ -(change >> (8 * width - 1))  # small numbers of either sign
    ranked = np.sort(np.pad(old[change > 0] << 1, (1, 0)))
    limits = ranked[np.arange(1, _LISTS) * len(ranked) // _LISTS]
    data = _HEAD.pack(xxhash.xxh3_128_digest(raw), width) + limits.tobytes()
    for places in _places(old, limits):
        found = np.flatnonzero(change[places])
        gaps = (np.diff(found, prepend=-1) - 1).astype(np.uint64)
        data += _SIZE.pack(len(found)) + _rice(gaps) + _rice(change[places][found] - 1)
        change[places] = 0
    return data


def decode(stored: memoryview, into: memoryview) -> None:
    """Turn the base, which `into` holds, into the chunk. Raises CorruptObject; `into` then holds anything."""
    try:
        digest, width = _HEAD.unpack_from(stored)
        words = np.frombuffer(into, f"<u{width}" if width in _WIDTHS else "")
        limits = np.frombuffer(stored, words.dtype, _LISTS - 1, _HEAD.size)
        rest = stored[_HEAD.size + limits.nbytes :]
        for places in _places(words, limits):
            (count,) = _SIZE.unpack_from(rest)
            if count > len(words):
                raise ValueError("more differences than words")
            gaps, rest = _numbers(rest[_SIZE.size :], count)
            change, rest = _numbers(rest, count)
            found = np.cumsum(gaps + np.uint64(1)).astype(np.int64) - 1
            change = (change + np.uint64(1)).astype(words.dtype)
            at = found if isinstance(places, slice) else places[found]
            words[at] += (change >> 1) ^ -(change & 1)
    except (struct.error, TypeError, ValueError, IndexError, ZstdError) as error:
        raise CorruptObject(f"a delta is not valid: {error}") from error
    if len(rest) or xxhash.xxh3_128_digest(into) != digest:
        raise CorruptObject("a delta does not give the chunk that it was made of")


def _places(words: Any, limits: Any) -> Iterator[Any]:
    """Where the words of each list are."""
    magnitudes = words << 1  # without the sign of a float
    for limit in limits:
        yield np.flatnonzero(magnitudes < limit)
    yield slice(None)


def _rice(words: Any) -> bytes:
    """The low bits of each number, least significant first, after the rest of each in unary."""
    low = max(1, int(words.sum(dtype=float) * _LN2 / (len(words) + 1))).bit_length() - 1
    ends = np.cumsum((words >> low) + np.uint64(1), dtype=np.int64)
    bits = np.zeros(ends.max(initial=0), np.uint8)
    bits[ends - 1] = 1
    unary = np.packbits(bits).tobytes()
    frame = pack_huffman(unary)
    apart = np.packbits(words[:, None] >> np.arange(low, dtype=words.dtype) & 1).tobytes()
    if len(frame) < len(unary):
        low, unary = low + _FRAME, frame
    return _CODE.pack(low, len(unary)) + unary + apart


def _numbers(stored: memoryview, count: int) -> tuple[Any, memoryview]:
    """So many numbers, and what follows them."""
    low, size = _CODE.unpack_from(stored)
    unary, rest = stored[_CODE.size :][:size], stored[_CODE.size + size :]
    if low >= _FRAME:
        unary = memoryview(unpack(unary, min(frame_content_size(unary), count)))
    low %= _FRAME
    end = -(-count * low // 8)
    bits = np.unpackbits(np.frombuffer(unary, np.uint8))
    apart = np.unpackbits(np.frombuffer(rest[:end], np.uint8))[: count * low]
    if bits.sum() != count:
        raise ValueError("not as many numbers as differences")
    high = (np.diff(np.flatnonzero(bits), prepend=-1) - 1).astype(np.uint64) << np.uint64(low)
    powers = np.uint64(1) << np.arange(low, dtype=np.uint64)
    return high + apart.reshape(count, low) @ powers, rest[end:]
