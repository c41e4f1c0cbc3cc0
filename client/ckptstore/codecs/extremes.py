"""Extremes and a sample of the words of floating-point numbers, taken block by block while a chunk is encoded.

Words of floats are ordered by sign and magnitude. So the largest unsigned word is the lowest negative number, the
largest signed word is the largest positive number, and the smallest unsigned word is the number closest to zero. The
encoder has the upper halves of a block's words, and the largest of them. Only where they reach the extreme so far are
the words themselves searched: a second pass over half of the bytes, and few more. All of it happens while the block is
in the cache. Even calls of Python take several times as long when their code is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[Any]
Seen = Callable[[memoryview], object]
"""Called with each part of a chunk before it is encoded, in order."""

_LARGEST_POSITIVE = 0x7FFF
_BELOW_ALL, _ABOVE_ALL = -(1 << 63), 1 << 64
_largest_of = np.maximum.reduce


def ignore(part: memoryview) -> None:
    """Does nothing with a part of a chunk."""


class BlockExtremes:
    """The exact extremes of a chunk of words of 16 or 32 bits, and a sample of its words. For one thread."""

    __slots__ = ("_blocks", "_places", "_smallest", "added", "signed", "size", "taken", "unsigned")

    def __init__(self, size: int, places: Sequence[Words | None]) -> None:
        """size: words of the chunk. places: of the words to sample in each block and in the rest; None: none."""
        self.size = size
        self._places = places
        self._blocks = 0
        self.added = 0
        """Number of words that were added. Not `size`: the extremes are not those of the chunk."""
        self.unsigned = _BELOW_ALL
        """The largest word, as unsigned number."""
        self.signed = _BELOW_ALL
        """The largest word, as signed number."""
        self._smallest = _ABOVE_ALL
        self.taken: list[Words] = []
        """The sampled words."""

    def add(self, words: Words, high: Words, highest: int) -> None:
        """Add the next block. high: the upper 16 bits of its words, in any order. highest: the largest of these."""
        self._next_block(words)
        negative = highest > _LARGEST_POSITIVE
        top = int(_largest_of(high.view(np.int16))) if negative else highest
        if words.itemsize == 2:
            below = 0
            self.unsigned, self.signed = max(self.unsigned, highest), max(self.signed, top)
        else:
            below = 16
            if negative and highest >= self.unsigned >> below:
                self.unsigned = max(self.unsigned, int(_largest_of(words)))
            if top >= self.signed >> below:
                self.signed = max(self.signed, int(_largest_of(words.view(np.int32))))
        if not negative and self._smallest and int(high.min()) <= self._smallest >> below:
            self._smallest = min(self._smallest, int(words.min()))

    def add_found(self, words: Words, unsigned: int, signed: int, smallest: int | None) -> None:
        """Add the next block, whose extremes are known. smallest: as unsigned number; None: a word is negative."""
        self._next_block(words)
        self.unsigned, self.signed = max(self.unsigned, unsigned), max(self.signed, signed)
        if smallest is not None:
            self._smallest = min(self._smallest, smallest)

    def add_rest(self, words: Words) -> None:
        """Add the words after the last block."""
        self._take(words, self._places[-1])
        self.unsigned = max(self.unsigned, int(words.max()))
        self.signed = max(self.signed, int(words.view(f"i{words.itemsize}").max()))
        self._smallest = min(self._smallest, int(words.min()))

    def _next_block(self, words: Words) -> None:
        self._take(words, self._places[self._blocks])
        self._blocks += 1

    def _take(self, words: Words, places: Words | None) -> None:
        """Count the words and keep the sampled ones."""
        if places is not None:
            self.taken.append(words.take(places))
        self.added += len(words)

    @property
    def bounds(self) -> tuple[int, int, int]:
        """The largest word as unsigned and as signed number, and the smallest as unsigned number.

        The last one is right only if no word is negative; otherwise it bounds nothing.
        """
        return max(self.unsigned, self.signed), self.signed, self._smallest
