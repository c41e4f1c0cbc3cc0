"""The element types of checkpoints, by their names in torch: sizes, and the numbers in their bytes. Pure.

Types that numpy lacks (bfloat16, float8) are decoded by shifts or by tables. A complex number counts as two numbers.
"""

from __future__ import annotations

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
