"""Boxes: rectangular parts of an entry, with as many dimensions as the entry; and the overlaps of boxes. Pure.

A box is one tuple: its offsets, then its sizes. All counts are in elements, and all orders are row-major. Overlaps of
saved slices and requested boxes are computed on whole columns.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ckptstore.codecs.dtypes import ITEM_BYTES
from ckptstore.errors import CorruptObject
from ckptstore.format.columns import Column, column
from ckptstore.format.documents import Content
from ckptstore.values import Value

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


class BoxGroup(NamedTuple):
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
        step = most or len(of_count)
        for first in range(0, len(of_count), step):
            chosen = of_count[first : first + step]
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
        keys = np.frombuffer(os.urandom(8 * 2 * MAX_DIMENSIONS), np.uint64).reshape(2, MAX_DIMENSIONS)
        self._points = [(key, np.zeros(number, np.int64)) for key in keys]
        """The key of each dimension, and the sum of each shape."""
        self._boxes = np.zeros(number, np.int64)

    def add(self, groups: Column, starts: Matrix, lengths: Matrix) -> None:
        """Add boxes. groups: the number of the shape of each; it must be within it, and not be empty."""
        self._boxes += np.bincount(groups, minlength=len(self._boxes))
        for first in range(0, len(groups), BLOCK):
            rows = slice(first, first + BLOCK)
            for keys, sums in self._points:
                # With a prime below 2**31 the sum of as many boxes as fit into memory does not overflow.
                np.add.at(sums, groups[rows], _difference(starts[rows], starts[rows] + lengths[rows], keys))

    def untiled(self, groups: Column, shapes: Matrix) -> Column:
        """The given shapes that are not tiled. groups: the number of each."""
        bad = self._boxes[groups] == 0
        for keys, sums in self._points:
            bad |= sums[groups] % _PRIME != _difference(np.zeros_like(shapes), shapes, keys)
        left: Column = groups[bad]
        return left


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


class Want(Value, gc=False):
    """A requested box of an entry, and the buffer for its row-major bytes."""

    entry: str
    box: Box | None
    """None: the whole entry."""
    buffer: str
    at: int = 0
    """Byte offset of the box in the buffer."""


class Overlaps(NamedTuple):
    """Pairs of a slice and a requested box that overlap, all with the same number of dimensions."""

    want: Column
    """Number of the want."""
    row: Column
    """Number of the slice."""
    slices: Matrix
    """The box of each slice."""
    wanted: Matrix
    """The requested box."""
    box: Matrix
    """Their intersection."""


def overlaps(content: Content, wants: Sequence[Want]) -> Iterator[Overlaps]:
    """All overlaps. Raises CorruptObject unless the slices cover each requested box exactly."""
    index = {name: number for number, name in enumerate(content.entries.name)}
    for numbers in _layers(wants):
        yield from _layer(content, wants, numbers, [index[wants[number].entry] for number in numbers])


def check_cover(content: Content) -> None:
    """Raises CorruptObject unless the slices of every entry cover it exactly."""
    shapes = content.entries.shape
    tilings = Tilings(len(shapes))
    for group in same_dimensions(content, np.arange(len(content.slices.entry)), BLOCK):
        filled = np.flatnonzero(group.bytes)
        tilings.add(content.slices.entry[group.rows[filled]], group.offsets[filled], group.sizes[filled])
    for count in set(map(len, shapes)):
        numbers = [n for n, shape in enumerate(shapes) if len(shape) == count and 0 not in shape]
        wanted = np.array([shapes[n] for n in numbers], np.int64).reshape(len(numbers), count)
        if len(bad := tilings.untiled(column(numbers), wanted)):
            raise _gap(content.entries.name[bad[0]])


def _layers(wants: Sequence[Want]) -> list[list[int]]:
    """The numbers of the wants in lists, each of which has an entry at most once."""
    if len({want.entry for want in wants}) == len(wants):
        return [list(range(len(wants)))]
    layers: dict[int, list[int]] = defaultdict(list)
    count = Counter[str]()
    for number, want in enumerate(wants):
        layers[count[want.entry]].append(number)
        count[want.entry] += 1
    return list(layers.values())


def _layer(
    content: Content, wants: Sequence[Want], numbers: Sequence[int], entry_of: Sequence[int]
) -> Iterator[Overlaps]:
    shapes, slices = content.entries.shape, content.slices
    wanted = {
        number: whole(shapes[entry]) if (box := wants[number].box) is None else box
        for number, entry in zip(numbers, entry_of, strict=True)
    }
    missing = set(wanted)
    want_of = np.full(len(shapes), -1)
    want_of[entry_of] = numbers
    blocks = same_dimensions(content, np.flatnonzero(want_of[slices.entry] >= 0), BLOCK)
    for dimensions, groups in groupby(blocks, key=lambda group: group.shapes.shape[1]):
        goals = np.zeros((max(wanted) + 1, 2 * dimensions), np.int64)
        mine = [number for number, box in wanted.items() if len(box) == 2 * dimensions]
        goals[mine] = [wanted[number] for number in mine]
        found = _meet(groups, want_of[slices.entry], goals)
        _check_tiling(wants, found)
        missing.difference_update(found.want.tolist())
        yield found
    if gaps := [number for number in missing if 0 not in sizes(wanted[number])]:
        raise _gap(wants[min(gaps)].entry)


def _meet(groups: Iterable[BoxGroup], want_of: Column, goals: Matrix) -> Overlaps:
    """The overlaps of slices with the same number of dimensions, in the order of the wants.

    want_of: the number of the want of each slice. goals: the box of each want.
    """
    dimensions, parts = goals.shape[1] // 2, []
    for group in groups:
        numbers = want_of[group.rows]
        meet = np.arange(len(numbers))
        for at in range(dimensions):  # most slices are outside of the box in the one dimension that is sharded
            begin, wanted_at = group.offsets[meet, at], goals[:, at][numbers[meet]]
            ends = begin + group.sizes[meet, at], wanted_at + goals[:, dimensions + at][numbers[meet]]
            meet = meet[np.maximum(begin, wanted_at) < np.minimum(*ends)]
        parts.append((numbers[meet], group.rows[meet], group.boxes[meet]))
    numbers, rows, slices = map(np.concatenate, zip(*parts, strict=True))
    order = np.argsort(numbers, kind="stable")
    numbers, rows, slices = numbers[order], rows[order], slices[order]
    wanted = goals[numbers]
    low = np.maximum(slices[:, :dimensions], wanted[:, :dimensions])
    ends = slices[:, :dimensions] + slices[:, dimensions:], wanted[:, :dimensions] + wanted[:, dimensions:]
    return Overlaps(numbers, rows, slices, wanted, np.concatenate([low, np.minimum(*ends) - low], axis=1))


def _check_tiling(wants: Sequence[Want], found: Overlaps) -> None:
    """Raises CorruptObject unless the overlaps cover each requested box exactly."""
    # A single slice that covers the whole box is the common case, and needs no further check.
    parts = np.flatnonzero((np.bincount(found.want)[found.want] > 1) | (found.box != found.wanted).any(axis=1))
    if not len(parts):
        return
    numbers, box, wanted, half = found.want[parts], found.box[parts], found.wanted[parts], found.box.shape[1] // 2
    tilings = Tilings(len(wants))
    tilings.add(numbers, (box - wanted)[:, :half], box[:, half:])
    first = np.flatnonzero(np.diff(numbers, prepend=-1))  # of each want: overlaps are in the order of the wants
    for bad in tilings.untiled(numbers[first], wanted[first, half:]).tolist():
        raise _gap(wants[bad].entry)


def _gap(entry: str) -> CorruptObject:
    return CorruptObject(
        f"the slices of entry {entry!r} leave a gap or overlap",
        "The checkpoint was written by a faulty program; use another one",
    )
