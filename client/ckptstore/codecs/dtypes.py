"""The element types of checkpoints, by their names in torch: sizes, bit layouts, and how words decode to numbers. Pure.

Types that numpy lacks (bfloat16, float8) are decoded by shifts or by tables. A complex number counts as two numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

ITEM_BYTES: dict[str, int] = {
    "complex128": 16,
    "complex64": 8,
    "complex32": 4,
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of one element."""

NUMPY: dict[str, np.dtype[Any]] = {
    name: np.dtype(name)
    for name in (
        "complex128", "complex64", "float64", "float32", "float16", "bool",
        "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8",
    )
}  # fmt: skip
"""The types that numpy supports too; arrays of other types can be neither captured nor restored."""

Words = np.ndarray[Any, np.dtype[Any]]
Numbers = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class FloatLayout:
    """The bit layout of a floating-point type. Words that differ only in the sign bit have opposite values."""

    word: np.dtype[Any]
    """Unsigned integer of the type's size."""
    sign: int
    """Mask of the sign bit; 0: the type has no sign."""
    mantissa: int
    """Number of bits of the mantissa."""
    bias: int
    """The exponent of a number is its exponent field minus this."""
    last: int
    """The largest word of a finite number, without the sign bit."""
    infinity: int | None
    """The word of infinity; None: the type has none."""
    nan: int | None = None
    """The only word of NaN, if it is not above `last` and `infinity`: that of -0 in the `fnuz` types."""

    @property
    def exponents(self) -> int:
        """Number of different exponent fields."""
        bits = 8 * self.word.itemsize - self.mantissa - bool(self.sign)
        return 1 << bits


def _ieee(bits: int, mantissa: int) -> FloatLayout:
    infinity = (1 << (bits - 1)) - (1 << mantissa)
    bias = (1 << (bits - mantissa - 2)) - 1
    return FloatLayout(np.dtype(f"u{bits // 8}"), 1 << (bits - 1), mantissa, bias, infinity - 1, infinity)


_BYTE = np.dtype(np.uint8)
FLOATS: dict[str, FloatLayout] = {
    "float64": _ieee(64, 52),
    "float32": _ieee(32, 23),
    "float16": _ieee(16, 10),
    "bfloat16": _ieee(16, 7),
    "float8_e5m2": _ieee(8, 2),
    "float8_e4m3fn": FloatLayout(_BYTE, 0x80, 3, 7, 0x7E, None),
    "float8_e4m3fnuz": FloatLayout(_BYTE, 0x80, 3, 8, 0x7F, None, nan=0x80),
    "float8_e5m2fnuz": FloatLayout(_BYTE, 0x80, 2, 16, 0x7F, None, nan=0x80),
    "float8_e8m0fnu": FloatLayout(_BYTE, 0, 0, 127, 0xFE, None),
}
"""By element type. Of 8 bits: arXiv 2209.05433, arXiv 2206.02915, and the OCP specification of microscaling formats."""
COMPONENTS = {"complex128": "float64", "complex64": "float32", "complex32": "float16"}
"""The type of the two numbers of a complex one."""


def number_type(dtype: str) -> str:
    """The type of the numbers that an element of `dtype` consists of."""
    return COMPONENTS.get(dtype, dtype)


def layout_of(dtype: str) -> FloatLayout | None:
    """The bit layout of the numbers of a type; None for integers."""
    return FLOATS.get(number_type(dtype))


def words_of(dtype: str, raw: memoryview) -> Words:
    """The bytes of whole elements as words: unsigned integers for floats, else the integers themselves."""
    kind = number_type(dtype)
    if kind in FLOATS:
        return np.frombuffer(raw, FLOATS[kind].word)
    return np.frombuffer(raw, np.uint8 if kind == "bool" else NUMPY[kind])


def decode_words(dtype: str, words: Words) -> Numbers:
    """The numbers of some words, as float64: exact but for integers beyond 2^53."""
    return _DECODERS.get(number_type(dtype), _integers)(words)


def _integers(words: Words) -> Numbers:
    return words.astype(np.float64)


def _bfloat16(words: Words) -> Numbers:
    return _quiet((words.astype(np.uint32) << np.uint32(16)).view(np.float32))


def _quiet(numbers: Words) -> Numbers:
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return numbers.astype(np.float64)


def _by_table(dtype: str) -> Callable[[Words], Numbers]:
    return lambda words: _table(dtype)[words]


@cache
def _table(dtype: str) -> Any:
    """The numbers of all words of an 8-bit type."""
    layout = FLOATS[dtype]
    words = np.arange(256)
    field = (words & ~layout.sign) >> layout.mantissa
    fraction = (words & ((1 << layout.mantissa) - 1)) / (1 << layout.mantissa)
    is_normal = (field > 0) | (layout.sign == 0)
    size = np.ldexp(is_normal + fraction, np.where(is_normal, field, 1) - layout.bias)
    found = np.where((words & layout.sign) > 0, -size, size).astype(np.float64)
    magnitude = words & ~layout.sign
    found[magnitude > layout.last] = np.nan
    if layout.infinity is not None:
        found[layout.infinity], found[layout.infinity | layout.sign] = np.inf, -np.inf
    if layout.nan is not None:
        found[layout.nan] = np.nan
    return found


_DECODERS: dict[str, Callable[[Words], Numbers]] = {
    "float64": lambda words: words.view(np.float64),
    "float32": lambda words: _quiet(words.view(np.float32)),
    "float16": lambda words: _quiet(words.view(np.float16)),
    "bfloat16": _bfloat16,
    **{dtype: _by_table(dtype) for dtype, layout in FLOATS.items() if layout.word == _BYTE},
}
