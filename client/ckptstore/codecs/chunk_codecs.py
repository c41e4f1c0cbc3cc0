"""Chunk codecs: raw, zstd and float-split. They map bytes to bytes, and release the GIL in their loops.

float-split (float_split.py) entropy-codes the exponents of floating-point numbers, which are far from uniform. It
stores sign and mantissa unchanged, because they are close to noise. The idea is ZipNN's (arXiv 2411.05239); the layout
is ours and is specified in docs/explanation/format.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ckptstore.codecs import delta, float_split
from ckptstore.codecs.dtypes import Extremes, Seen, ignore
from ckptstore.codecs.frames import Buffer as Buffer
from ckptstore.codecs.frames import pack, unpack
from ckptstore.errors import CorruptObject

MAX_CHUNK_BYTES = 64 << 20
"""Largest size of a chunk, raw or encoded; a reader rejects larger ones."""

RAW = "raw"
ZSTD = "zstd"
FLOAT_SPLIT = {
    "float32": "float-split/float32",
    "bfloat16": "float-split/bfloat16",
    "float16": "float-split/float16",
}
CODECS = (RAW, ZSTD, *FLOAT_SPLIT.values())
"""The codecs of whole chunks."""
_DTYPES = {codec: dtype for dtype, codec in FLOAT_SPLIT.items()}


def encode(
    codec: str,
    raw: memoryview,
    level: int = 1,
    extremes: Extremes | None = None,
    seen: Seen = ignore,
) -> tuple[str, Buffer]:
    """Encode one chunk.

    raw: contiguous bytes, whole elements. level: higher levels are slower and smaller. extremes: float-split
    adds all words to it. seen: gets `raw`, each part before it is encoded, unless the codec is "raw". Returns the codec
    that was used and the encoded bytes: codec "raw" and `raw` itself if the requested codec would not save space.
    """
    if codec == RAW or not len(raw):
        return RAW, raw
    if codec == ZSTD:
        seen(raw)
        encoded: Buffer = pack(raw, level)
    else:
        encoded = float_split.encode(_DTYPES[codec], raw, level, extremes, seen)
    return (codec, encoded) if len(encoded) < len(raw) else (RAW, raw)


def decode(codec: str, stored: memoryview, into: memoryview) -> None:
    """Decode one chunk into `into`, which must have exactly the raw size; for a delta, it holds the base.

    Raises CorruptObject if the bytes are not valid output of the codec. Never writes outside `into`.
    """
    if codec == RAW:
        if len(stored) != len(into):
            raise CorruptObject(f"raw chunk holds {len(stored)} bytes, its document says {len(into)}")
        into[:] = stored
    elif codec == ZSTD:
        into[:] = unpack(stored, len(into))
    elif codec in _DTYPES:
        float_split.decode(_DTYPES[codec], stored, into)
    elif codec == delta.DELTA:
        delta.decode(stored, into)
    else:
        raise CorruptObject(f"chunk codec {codec!r} is unknown")


class Coding(NamedTuple):
    """A codec and its level. Only writers need the level: readers decode all levels alike."""

    codec: str
    level: int = 1


CodingPolicy = Callable[[str], Coding]
"""The coding of each element type."""


def off(dtype: str) -> Coding:
    """No encoding."""
    return Coding(RAW)


def fast(dtype: str) -> Coding:
    """The smallest coding that keeps up with disks and networks."""
    return Coding(FLOAT_SPLIT.get(dtype, ZSTD))


def smallest(dtype: str) -> Coding:
    """The smallest coding, however slow."""
    return Coding(fast(dtype).codec, 9)


POLICIES: dict[str, CodingPolicy] = {"off": off, "fast": fast, "max": smallest}
"""Policies by the value of the `compress` option."""
