"""Chunk codecs: raw, zstd and float-split. Bytes in, bytes out; every call releases the GIL in its loops.

float-split stores the exponents of floating-point numbers, which are far from uniform,
entropy-coded by zstd (Huffman only), and sign and mantissa, which are close to noise, as they are.
The idea is ZipNN's (arXiv 2411.05239); the layout below is ours and is specified in docs/format.md.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from ckptstore.errors import CorruptObject

Buffer = bytes | bytearray | memoryview
Plane = npt.NDArray[Any]

MAX_CHUNK_BYTES = 64 << 20
"""No chunk, encoded or not, is larger; a reader refuses one that claims to be."""

_BLOCK = 1 << 16  # elements: planes of a block stay in the L2 cache
_U32 = struct.Struct("<I")

# Huffman only: with these parameters zstd's match finder finds nothing and costs next to nothing.
_EXPONENTS = zstandard.ZstdCompressionParameters(
    format=zstandard.FORMAT_ZSTD1,
    window_log=17,
    chain_log=6,
    hash_log=6,
    search_log=1,
    min_match=7,
    target_length=0,
    strategy=zstandard.STRATEGY_FAST,
)


RAW = "raw"
ZSTD = "zstd"
FLOAT_SPLIT = {
    "float32": "float-split/float32",
    "bfloat16": "float-split/bfloat16",
    "float16": "float-split/float16",
}
CODECS = (RAW, ZSTD, *FLOAT_SPLIT.values())
"""Every codec name that may stand in a document."""


def best_codec(dtype: str) -> str:
    """The codec that stores `dtype` smallest among those that are fast."""
    return FLOAT_SPLIT.get(dtype, ZSTD)


def encode(codec: str, raw: memoryview, level: int = 1) -> tuple[str, list[Buffer]]:
    """Encode one chunk.

    raw: contiguous bytes, whole elements. Returns the codec really used (`raw` where the
    asked one would not save space) and the encoded bytes as buffers to be written in order.
    """
    if codec == RAW or not len(raw):
        return RAW, [raw]
    encoded: list[Buffer] = [_zstd(level, raw)] if codec == ZSTD else _split(_FLOATS[codec], raw)
    if sum(len(part) for part in encoded) >= len(raw):
        return RAW, [raw]
    return codec, encoded


def decode(codec: str, stored: memoryview, into: memoryview) -> None:
    """Decode one chunk into `into`, which has exactly the raw size.

    Raises CorruptObject when the bytes are not what the codec writes. Never writes outside `into`.
    """
    if codec == RAW:
        if len(stored) != len(into):
            raise CorruptObject(f"raw chunk holds {len(stored)} bytes, its document says {len(into)}")
        into[:] = stored
    elif codec == ZSTD:
        into[:] = _unzstd(stored, len(into))
    elif codec in _FLOATS:
        _join(_FLOATS[codec], stored, into)
    else:
        raise CorruptObject(f"chunk codec {codec!r} is unknown")


def _zstd(level: int, raw: Buffer) -> bytes:
    return zstandard.ZstdCompressor(level=level).compress(raw)


def _unzstd(stored: Buffer, expected: int) -> bytes:
    try:
        size = zstandard.get_frame_parameters(stored).content_size
        if size != expected:
            raise CorruptObject(f"zstd frame holds {size} bytes, its document says {expected}")
        raw = zstandard.ZstdDecompressor().decompress(stored, max_output_size=expected, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptObject(f"zstd frame cannot be decoded: {error}") from error
    if len(raw) != expected:  # a skippable frame claims a size and unpacks to nothing
        raise CorruptObject(f"zstd frame unpacks to {len(raw)} bytes, its document says {expected}")
    return raw


@dataclass(frozen=True, slots=True)
class _FloatLayout:
    """How one floating-point type is taken apart into exponent bytes and the rest, and put together."""

    word: Any
    split: Callable[[Plane], tuple[Plane, list[Buffer]]]
    join: Callable[[Plane, memoryview, Plane], None]


# One block: u32 stored size of the exponent plane (0: stored raw), exponent plane, rest planes.
# float32 rotates each word left by one, so that its top byte is the exponent and the low
# three bytes are mantissa and sign: planes of 2 bytes and 1 byte. The 16-bit types have one
# byte of rest (bfloat16: sign and 7 bits) or take sign and exponent together (float16).


def _split(layout: _FloatLayout, raw: memoryview) -> list[Buffer]:
    words: Plane = np.frombuffer(raw, dtype=layout.word)
    compressor = zstandard.ZstdCompressor(compression_params=_EXPONENTS)
    parts: list[Buffer] = []
    for start in range(0, len(words), _BLOCK):
        exponent, rest = layout.split(words[start : start + _BLOCK])
        packed = compressor.compress(exponent.data)
        if len(packed) < len(exponent):
            parts += [_U32.pack(len(packed)), packed, *rest]
        else:
            parts += [_U32.pack(0), exponent.data, *rest]
    return parts


def _join(layout: _FloatLayout, stored: memoryview, into: memoryview) -> None:
    if len(into) % np.dtype(layout.word).itemsize:
        raise CorruptObject(f"float-split chunk has a raw size of {len(into)} bytes, which is not whole elements")
    words: Plane = np.frombuffer(into, dtype=layout.word)
    width = words.itemsize - 1
    at = 0
    for start in range(0, len(words), _BLOCK):
        block = words[start : start + _BLOCK]
        count = len(block)
        if at + _U32.size > len(stored):
            raise CorruptObject("float-split chunk ends early")
        (packed,) = _U32.unpack_from(stored, at)
        at += _U32.size
        end = at + (packed or count)
        if packed > count or end + count * width > len(stored):
            raise CorruptObject("float-split chunk ends early")
        plane = _unzstd(stored[at:end], count) if packed else stored[at:end]
        layout.join(np.frombuffer(plane, dtype=np.uint8), stored[end : end + count * width], block)
        at = end + count * width
    if at != len(stored):
        raise CorruptObject(f"float-split chunk has {len(stored) - at} bytes too many")


def _split32(words: Plane) -> tuple[Plane, list[Buffer]]:
    rotated = (words << np.uint32(1)) | (words >> np.uint32(31))
    low = rotated.astype(np.uint16)
    rotated >>= np.uint32(16)
    high = rotated.astype(np.uint16)
    third = high.astype(np.uint8)
    high >>= np.uint16(8)
    return high.astype(np.uint8), [low.data.cast("B"), third.data]


def _join32(exponent: Plane, rest: memoryview, into: Plane) -> None:
    count = len(exponent)
    low = np.frombuffer(rest[: 2 * count], dtype=np.uint16)
    third = np.frombuffer(rest[2 * count :], dtype=np.uint8)
    high = exponent.astype(np.uint16)
    high <<= np.uint16(8)
    high |= third
    rotated = high.astype(np.uint32)
    rotated <<= np.uint32(16)
    rotated |= low
    np.right_shift(rotated, np.uint32(1), out=into)
    rotated <<= np.uint32(31)
    np.bitwise_or(into, rotated, out=into)


def _split_b16(words: Plane) -> tuple[Plane, list[Buffer]]:
    exponent = (words >> np.uint16(7)).astype(np.uint8)
    rest = (words >> np.uint16(8)) & np.uint16(0x80)
    rest |= words & np.uint16(0x7F)
    return exponent, [rest.astype(np.uint8).data]


def _join_b16(exponent: Plane, rest: memoryview, into: Plane) -> None:
    low = np.frombuffer(rest, dtype=np.uint8).astype(np.uint16)
    np.left_shift(exponent, np.uint16(7), out=into, dtype=np.uint16)
    np.bitwise_or(into, low & np.uint16(0x7F), out=into)
    low &= np.uint16(0x80)
    low <<= np.uint16(8)
    np.bitwise_or(into, low, out=into)


def _split_16(words: Plane) -> tuple[Plane, list[Buffer]]:
    return (words >> np.uint16(8)).astype(np.uint8), [words.astype(np.uint8).data]


def _join_16(high: Plane, rest: memoryview, into: Plane) -> None:
    np.left_shift(high, np.uint16(8), out=into, dtype=np.uint16)
    np.bitwise_or(into, np.frombuffer(rest, dtype=np.uint8), out=into)


_FLOATS = {
    FLOAT_SPLIT["float32"]: _FloatLayout(np.uint32, _split32, _join32),
    FLOAT_SPLIT["bfloat16"]: _FloatLayout(np.uint16, _split_b16, _join_b16),
    FLOAT_SPLIT["float16"]: _FloatLayout(np.uint16, _split_16, _join_16),
}
