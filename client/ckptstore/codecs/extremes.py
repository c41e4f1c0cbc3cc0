"""The extremes of the words of a chunk, taken block by block while they are in the cache.

Words of floats are ordered by sign and magnitude. So the largest unsigned word is the lowest negative number, the
largest signed word is the largest positive number, and the smallest unsigned word is the number closest to zero. NaN
and Inf are beyond all finite numbers of their sign.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ckptstore.codecs.dtypes import ITEM_BYTES, numbers_of

Seen = Callable[[memoryview], object]
"""Called with each part of a chunk before it is encoded, in order."""


def ignore(part: memoryview) -> None:
    """Does nothing with a part of a chunk."""


class Extremes:
    """The exact extremes of a chunk of floats of 16 or 32 bits. For one thread."""

    __slots__ = ("dtype", "signed", "smallest", "unsigned")

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.unsigned = -1
        """The largest word, as unsigned number; -1: no word was added."""
        self.signed = -(1 << 31)
        """The largest word, as signed number."""
        self.smallest = 1 << 32
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
