"""Boxes: rectangular parts of an entry, with as many dimensions as the entry. Pure.

A box is one tuple: its offsets, then its sizes. All counts are in elements, and all orders are row-major.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ckptstore.codecs.dtypes import ITEM_BYTES
from ckptstore.format.columns import Column, column

if TYPE_CHECKING:
    from ckptstore.format.documents import Content

Box = tuple[int, ...]
Matrix = np.ndarray[Any, np.dtype[np.int64]]
"""One row per box, one column per dimension."""

_PRIME = (1 << 31) - 1
MAX_DIMENSIONS = 64
BLOCK = 1 << 14
"""Boxes at a time: what is computed of them stays in the cache, and in memory that malloc has."""


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole entry."""
    return (0,) * len(shape) + tuple(shape)


def offsets(box: Box) -> Box:
    """The begin of a box in each dimension."""
    return box[: len(box) // 2]


def sizes(box: Box) -> Box:
    """The size of a box in each dimension."""
    return box[len(box) // 2 :]


def strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Number of elements from one index to the next, in each dimension."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def all_strides(shapes: Matrix) -> Matrix:
    """The strides of many shapes, one per row."""
    found = np.ones_like(shapes)
    found[:, :-1] = np.cumprod(shapes[:, :0:-1], axis=1)[:, ::-1]
    return found


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The elements [start, stop) of a row-major array as boxes, in order: at most twice the dimensions, less one."""
    if start >= stop:
        return []
    if len(shape) < 2:
        return [(start, stop - start)] if shape else [()]
    inner = prod(shape[1:])
    first, head = divmod(start, inner)
    end, tail = divmod(stop, inner)
    if first == end:
        return _lift(first, flat_boxes(shape[1:], head, tail))
    found = _lift(first, flat_boxes(shape[1:], head, inner)) if head else []
    first += bool(head)
    if first < end:
        found.append((first, *(0 for _ in shape[1:]), end - first, *shape[1:]))
    return found + _lift(end, flat_boxes(shape[1:], 0, tail))


def _lift(row: int, boxes: list[Box]) -> list[Box]:
    return [(row, *offsets(box), 1, *sizes(box)) for box in boxes]


@dataclass(frozen=True, slots=True)
class BoxGroup:
    """Slices of entries with the same number of dimensions."""

    rows: Column
    """Number of each slice."""
    boxes: Matrix
    shapes: Matrix
    """Shape of each slice's entry."""
    bytes: Column
    """Raw bytes of each slice."""

    @property
    def offsets(self) -> Matrix:
        """The offsets of each box."""
        return self.boxes[:, : self.shapes.shape[1]]

    @property
    def sizes(self) -> Matrix:
        """The sizes of each box."""
        return self.boxes[:, self.shapes.shape[1] :]


def same_dimensions(content: Content, rows: Column, most: int | None = None) -> Iterator[BoxGroup]:
    """The given slices, grouped by number of dimensions. most: the number of slices in a group, else all of them."""
    entries, slices = content.entries, content.slices
    of_entry = column(map(len, entries.shape))
    shape_ends = np.cumsum(of_entry)
    shapes = column(chain.from_iterable(entries.shape))
    dimensions = of_entry[slices.entry]
    box_ends = np.cumsum(2 * dimensions)
    items = column(map(ITEM_BYTES.__getitem__, entries.dtype))
    counts = dimensions[rows]
    for count in np.flatnonzero(np.bincount(counts)).tolist():
        of_count = rows[counts == count]
        for first in range(0, len(of_count), most or len(of_count)):
            chosen = of_count[first : first + most] if most else of_count
            entry, ends = slices.entry[chosen], box_ends[chosen]
            if chosen[-1] - chosen[0] == len(chosen) - 1:  # neighbours: nothing has to be copied
                box = slices.box[ends[0] - 2 * count : ends[-1]].reshape(len(chosen), 2 * count)
            else:
                box = sliding_window_view(slices.box, 2 * count)[ends - 2 * count]
            shape = sliding_window_view(shapes, count)[shape_ends[entry] - count]
            size = items[entry]
            for at in range(count, 2 * count):  # ten times as fast as a product along the rows
                size = size * box[:, at]
            yield BoxGroup(chosen, box, shape, size)


class Tilings:
    """Finds out which shapes are tiled by boxes: whether these cover every element exactly once.

    Boxes tile a shape if their indicator functions add up to that of the shape. Then so do, in each dimension, the
    differences of these functions: +1 where a box begins, -1 where it ends. They are compared as polynomials at two
    unpredictable points, modulo a prime. The time is linear in the number of boxes; about one wrong result in 10**15.
    """

    def __init__(self, number: int) -> None:
        """number: of shapes."""
        self._keys = np.frombuffer(os.urandom(8 * 2 * MAX_DIMENSIONS), np.uint64).reshape(2, MAX_DIMENSIONS)
        self._sums = np.zeros((2, number), np.int64)
        self._boxes = np.zeros(number, np.int64)

    def add(self, groups: Column, starts: Matrix, lengths: Matrix) -> None:
        """Add boxes. groups: the number of the shape of each; it must be within it, and not be empty."""
        self._boxes += np.bincount(groups, minlength=len(self._boxes))
        for first in range(0, len(groups), BLOCK):
            rows = slice(first, first + BLOCK)
            for sums, keys in zip(self._sums, self._keys, strict=True):
                # With a prime below 2**31 the sum of as many boxes as fit into memory does not overflow.
                np.add.at(sums, groups[rows], _difference(starts[rows], starts[rows] + lengths[rows], keys))

    def untiled(self, groups: Column, shapes: Matrix) -> Column:
        """Those of the given shapes that are not tiled. groups: the number of each."""
        bad = self._boxes[groups] == 0
        for sums, keys in zip(self._sums, self._keys, strict=True):
            bad |= sums[groups] % _PRIME != _difference(np.zeros_like(shapes), shapes, keys)
        left: Column = groups[bad]
        return left


def untiled(groups: Column, starts: Matrix, lengths: Matrix, shapes: Matrix) -> Column:
    """The groups whose boxes do not tile their shape. groups: the row of `shapes` of each box; see Tilings."""
    tilings = Tilings(len(shapes))
    tilings.add(groups, starts, lengths)
    return tilings.untiled(np.arange(len(shapes)), shapes)


def _difference(begin: Matrix, end: Matrix, keys: np.ndarray[Any, np.dtype[np.uint64]]) -> Column:
    product = np.ones(len(begin), np.int64)
    for dimension, key in enumerate(keys[: begin.shape[1]]):
        factor = _point(begin[:, dimension], key) - _point(end[:, dimension], key)
        product = product * (factor % _PRIME) % _PRIME
    return product


def _point(index: Column, key: np.uint64) -> Column:
    """A number below the prime for each index, pseudorandom to anyone without the key (SplitMix64)."""
    mixed = index.astype(np.uint64) + key
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return ((mixed ^ (mixed >> np.uint64(31))) % np.uint64(_PRIME)).astype(np.int64)
