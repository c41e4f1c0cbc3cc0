"""Extremes of the words of floating-point numbers, found block by block while a chunk is encoded.

Words of floats are ordered by sign and magnitude. So the largest unsigned word is the lowest negative number, the
largest signed word is the largest positive number, and the smallest unsigned word is the number closest to zero. The
encoder has the upper halves of a block's words, and the largest of them. Only where they reach the extreme so far are
the words themselves searched: a second pass over half of the bytes, and few more.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[Any]

_LARGEST_POSITIVE = 0x7FFF
_BELOW_ALL, _ABOVE_ALL = -(1 << 63), 1 << 64


class BlockExtremes:
    """The extremes of a chunk of words of 16 or 32 bits: exact when all words are added, some of them once or twice."""

    def __init__(self) -> None:
        self.unsigned = _BELOW_ALL
        """The largest word, as unsigned number."""
        self.signed = _BELOW_ALL
        """The largest word, as signed number."""
        self.smallest = _ABOVE_ALL
        """The smallest word, as unsigned number, of the blocks without negative numbers."""
        self.has_words = False

    def add(self, words: Words, high: Words, highest: int) -> None:
        """Add a block. high: the upper 16 bits of its words, in any order. highest: the largest of these."""
        self.has_words = True
        below = 8 * (words.itemsize - high.itemsize)
        if highest > _LARGEST_POSITIVE:
            if highest >= self.unsigned >> below:
                self.unsigned = max(self.unsigned, int(words.max()))
            top = int(high.view(np.int16).max())
        else:
            top = highest
            if self.smallest and int(high.min()) <= self.smallest >> below:
                self.smallest = min(self.smallest, int(words.min()))
        if top >= self.signed >> below:
            self.signed = max(self.signed, int(words.view(f"i{words.itemsize}").max()))

    def add_few(self, words: Words) -> None:
        """Add words that are in no block."""
        if len(words):
            self.unsigned = max(self.unsigned, int(words.max()))
            self.signed = max(self.signed, int(words.view(f"i{words.itemsize}").max()))
            self.smallest = min(self.smallest, int(words.min()))
