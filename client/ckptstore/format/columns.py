"""Columns of numbers: numpy arrays in memory, packed text in JSON. Pure.

A column of non-negative integers is written as "u1:", "u2:", "u4:" or "u8:", the width of one number in bytes, then the
little-endian numbers in base64. The smallest width that fits is used, so equal columns have equal text. The numbers of
a million slices decode in a tenth of the time of JSON lists (docs/decisions/0004).
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from ckptstore.format.decoding import convert

Column = np.ndarray[Any, np.dtype[np.int64]]
"""One number per row."""

_WIDTHS = {"u1": 1 << 8, "u2": 1 << 16, "u4": 1 << 32, "u8": 1 << 63}
"""The smallest number that a column of each width cannot hold."""
_SHORT = 4096
"""Characters of the columns that are decoded once if they are equal."""


def column(numbers: Iterable[int] = ()) -> Column:
    """A column of these numbers."""
    return np.fromiter(numbers, np.int64)


def concatenate(columns: Iterable[Column]) -> Column:
    """The columns joined in order."""
    return np.concatenate([column(), *columns])


def distinct(numbers: Column) -> Column:
    """Each number once, in order. np.unique imports numpy.ma at its first call: half of a first small restore."""
    ordered = np.sort(numbers, axis=None)
    new = np.ones(len(ordered), bool)
    np.not_equal(ordered[1:], ordered[:-1], out=new[1:])
    return ordered[new]


def pack(numbers: Column) -> str:
    """The text of a column of non-negative numbers."""
    top = int(numbers.max(initial=0))
    width = next(width for width, beyond in _WIDTHS.items() if top < beyond)
    return f"{width}:{base64.b64encode(numbers.astype(f'<{width}').tobytes()).decode('ascii')}"


def unpack(text: object) -> Column:
    """The inverse of `pack`. Raises ValueError for anything that is not a column."""
    if not isinstance(text, str):
        raise ValueError("a column is not text")
    return _unpack_short(text) if len(text) <= _SHORT else _unpack(text)


def _unpack(text: str) -> Column:
    width, colon, data = text.partition(":")
    if width not in _WIDTHS or not colon:
        raise ValueError(f"a column of {width[:8]!r}")
    try:
        packed = convert(data, bytes)  # a quarter of the time of binascii
    except msgspec.ValidationError as error:
        raise ValueError(f"a column is not base64: {error}") from error
    numbers = np.frombuffer(packed, f"<{width}").astype(np.int64)
    if width == "u8" and numbers.min(initial=0) < 0:
        raise ValueError("a number of a column is out of bounds")
    numbers.flags.writeable = False
    return numbers


# Most ranks have chunks of the same sizes and codecs.
_unpack_short = lru_cache(64)(_unpack)


def encode_hook(value: object) -> object:
    """msgspec hook: columns to text."""
    if isinstance(value, np.ndarray):
        return pack(value)
    raise NotImplementedError(f"{type(value).__name__} is not part of a document")


def decode_hook(kind: type, value: object) -> object:
    """msgspec hook: text to columns."""
    if kind == Column:
        return unpack(value)
    raise NotImplementedError(f"{kind} is not part of a document")
