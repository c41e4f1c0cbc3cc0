"""The element types of checkpoints, by their names in torch. Does not import torch."""

from __future__ import annotations

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
