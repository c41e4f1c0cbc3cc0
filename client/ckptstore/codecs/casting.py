"""Bit-exact casts from float32 to 16-bit types, from which derived slices are restored. Pure.

Values round to nearest, ties to even. Devices cast NaNs differently; here they are cast as torch does on CPUs. A tensor
with other NaNs does not count as a cast of its source.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

SOURCE = "float32"
"""The type from which derived slices are cast."""
CAST_TYPES = ("bfloat16", "float16")
"""The types to which they are cast."""

_Words = npt.NDArray[Any]
_BLOCK = 1 << 16  # elements: temporary arrays stay in the L2 cache
_INFINITY = np.uint32(0x7F800000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)


def cast(bits: _Words, dtype: str) -> _Words:
    """float32 words as words of `dtype`."""
    rounded = _to_bfloat16(bits) if dtype == "bfloat16" else _to_float16(bits)
    nan = (bits & _MAGNITUDE) > _INFINITY
    if nan.any():
        payload = (bits >> np.uint32(13) & np.uint32(0x3FF) | np.uint32(0x7E00)).astype(np.uint16)
        sign = (bits >> np.uint32(16)).astype(np.uint16) & np.uint16(0x8000)
        rounded[nan] = np.uint16(0xFFFF) if dtype == "bfloat16" else (sign | payload)[nan]
    return rounded


def cast_into(bits: _Words, dtype: str, target: _Words) -> None:
    """Cast into `target`, which has the same shape."""
    if bits.ndim != 1:
        target[...] = cast(bits, dtype)
        return
    for at in range(0, len(bits), _BLOCK):
        target[at : at + _BLOCK] = cast(bits[at : at + _BLOCK], dtype)


def is_cast(bits: _Words, dtype: str, words: _Words) -> bool:
    """Whether each of `words` is the cast of the float32 at its place."""
    blocks = range(0, len(bits), _BLOCK)
    return all(np.array_equal(cast(bits[at : at + _BLOCK], dtype), words[at : at + _BLOCK]) for at in blocks)


def _to_bfloat16(bits: _Words) -> _Words:
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    return rounded.astype(np.uint16)


def _to_float16(bits: _Words) -> _Words:
    with np.errstate(all="ignore"):
        return bits.view(np.float32).astype(np.float16).view(np.uint16)
