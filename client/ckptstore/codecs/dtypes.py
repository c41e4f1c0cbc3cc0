"""The element types of checkpoints, by their names in torch: sizes, the numbers in their bytes, casts, extremes. Pure.

Types that numpy lacks (bfloat16, float8) are decoded by shifts or by tables. A complex number counts as two numbers.

Derived slices are restored by bit-exact casts from float32 to 16-bit types. Values round to nearest, ties to even.
Devices cast NaNs differently; here they are cast as torch does on CPUs. A tensor with other NaNs does not count as a
cast of its source.

The extremes of the words of a chunk are taken block by block while they are in the cache. Words of floats are ordered
by sign and magnitude. So the largest unsigned word is the lowest negative number, the largest signed word is the
largest positive number, and the smallest unsigned word is the number closest to zero. NaN and Inf are beyond all finite
numbers of their sign.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from msgspec import Struct

NUMPY: dict[str, np.dtype[Any]] = {
    name: np.dtype(name)
    for name in (
        "complex128", "complex64", "float64", "float32", "float16", "bool",
        "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8",
    )
}  # fmt: skip
"""The types that numpy supports too; arrays of other types can be neither captured nor restored."""

ITEM_BYTES: dict[str, int] = {
    **{name: dtype.itemsize for name, dtype in NUMPY.items()},
    "complex32": 4,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}
"""Bytes of one element."""

Numbers = np.ndarray[Any, np.dtype[Any]]

_COMPONENTS = {"complex128": "float64", "complex64": "float32", "complex32": "float16"}
"""The type of the two numbers of a complex one."""
_BYTES: dict[str, tuple[int, int, int]] = {
    "float8_e5m2": (2, 15, 0x7B),
    "float8_e4m3fn": (3, 7, 0x7E),
    "float8_e4m3fnuz": (3, 8, 0x7F),
    "float8_e5m2fnuz": (2, 16, 0x7F),
}
"""Floats of 8 bits: bits of the mantissa, bias of the exponent, and the largest finite word without the sign bit
(arXiv 2209.05433, arXiv 2206.02915)."""


def is_float(dtype: str) -> bool:
    """Whether its elements are floating-point or complex numbers."""
    return "float" in dtype or dtype in _COMPONENTS


def numbers_of(dtype: str, raw: memoryview) -> Numbers:
    """The numbers in the bytes of whole elements, exact, in a type that numpy computes with fast."""
    kind = _COMPONENTS.get(dtype, dtype)
    if kind == "bfloat16":
        return (np.frombuffer(raw, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    if kind == "float16":
        with np.errstate(invalid="ignore"):  # a signalling NaN
            return np.frombuffer(raw, np.float16).astype(np.float32)
    if kind in NUMPY:
        return np.frombuffer(raw, np.uint8 if kind == "bool" else NUMPY[kind])
    numbers: Numbers = _numbers_of_bytes(kind)[np.frombuffer(raw, np.uint8)]
    return numbers


@cache
def _numbers_of_bytes(dtype: str) -> Any:
    """The numbers of all words of an 8-bit type."""
    words = np.arange(256)
    if dtype == "float8_e8m0fnu":  # an exponent alone, of the OCP specification of microscaling formats
        return np.where(words < 0xFF, np.ldexp(1.0, words - 127), np.nan).astype(np.float32)
    mantissa, bias, last = _BYTES[dtype]
    magnitude = words & 0x7F
    exponent, fraction = magnitude >> mantissa, (magnitude & ((1 << mantissa) - 1)) / (1 << mantissa)
    numbers = np.ldexp((exponent > 0) + fraction, np.maximum(exponent, 1) - bias)
    numbers[magnitude > last] = np.nan
    if dtype == "float8_e5m2":
        numbers[magnitude == last + 1] = np.inf
    numbers = np.where(words > 0x7F, -numbers, numbers)
    if dtype.endswith("fnuz"):
        numbers[0x80] = np.nan  # there is no -0
    return numbers.astype(np.float32)


SOURCE = "float32"
"""The type from which derived slices are cast."""
CAST_TYPES = ("bfloat16", "float16")
"""The types to which they are cast."""

_BLOCK = 1 << 16  # temporary arrays stay in the L2 cache
_INFINITY = np.uint32(0x7F800000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)


def cast(bits: Numbers, dtype: str) -> Numbers:
    """float32 words as words of `dtype`."""
    if dtype == "bfloat16":
        rounded = bits >> np.uint32(16)
        rounded &= np.uint32(1)
        rounded += np.uint32(0x7FFF)
        rounded += bits
        rounded >>= np.uint32(16)
        rounded = rounded.astype(np.uint16)
    else:
        with np.errstate(all="ignore"):
            rounded = bits.view(np.float32).astype(np.float16).view(np.uint16)
    nan = (bits & _MAGNITUDE) > _INFINITY
    if nan.any():
        payload = (bits >> np.uint32(13) & np.uint32(0x3FF) | np.uint32(0x7E00)).astype(np.uint16)
        sign = (bits >> np.uint32(16)).astype(np.uint16) & np.uint16(0x8000)
        rounded[nan] = np.uint16(0xFFFF) if dtype == "bfloat16" else (sign | payload)[nan]
    return rounded


def cast_into(bits: Numbers, dtype: str, target: Numbers) -> None:
    """Cast into `target`, which has the same shape."""
    if bits.ndim != 1:
        target[...] = cast(bits, dtype)
        return
    for at in range(0, len(bits), _BLOCK):
        target[at : at + _BLOCK] = cast(bits[at : at + _BLOCK], dtype)


def is_cast(bits: Numbers, dtype: str, words: Numbers) -> bool:
    """Whether each of `words` is the cast of the float32 at its place."""
    blocks = range(0, len(bits), _BLOCK)
    return all(np.array_equal(cast(bits[at : at + _BLOCK], dtype), words[at : at + _BLOCK]) for at in blocks)


Seen = Callable[[memoryview], object]
"""Called with each part of a chunk before it is encoded, in order."""


def ignore(part: memoryview) -> None:
    """Does nothing with a part of a chunk."""


class Extremes(Struct):
    """The exact extremes of a chunk of floats of 16 or 32 bits. For one thread."""

    dtype: str
    unsigned: int = -1
    """The largest word, as unsigned number; -1: no word was added."""
    signed: int = -(1 << 31)
    """The largest word, as signed number."""
    smallest: int = 1 << 32
    """The smallest word, as unsigned number."""

    def add(self, unsigned: int, signed: int, smallest: int) -> None:
        """Add the extremes of some words."""
        self.unsigned = max(self.unsigned, unsigned)
        self.signed = max(self.signed, signed)
        self.smallest = min(self.smallest, smallest)

    def bounds(self) -> tuple[float, float]:
        """The smallest and the largest number; not finite if any number is not."""
        lowest = self.unsigned if self.unsigned != self.signed else self.smallest  # a negative one, if there is one
        largest = self.signed if self.signed >= 0 else self.smallest
        words = np.array([lowest, largest], f"<u{ITEM_BYTES[self.dtype]}")
        low, high = numbers_of(self.dtype, words.data.cast("B")).tolist()
        return low + 0.0, high + 0.0  # not -0.0
