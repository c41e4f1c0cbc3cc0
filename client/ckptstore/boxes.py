"""Boxes: parts of an entry with as many dimensions as the entry. Pure.

A box is its offsets, then its sizes, in one tuple; all counts are elements and all orders row-major.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptstore.columns import Column, column
from ckptstore.dtypes import ITEM_BYTES

if TYPE_CHECKING:
    from ckptstore.documents import Content

Box = tuple[int, ...]
Matrix = np.ndarray[Any, np.dtype[np.int64]]
"""One row per box, one column per dimension."""


def whole(shape: Sequence[int]) -> Box:
    """The box that is all of an entry."""
    return (*(0 for _ in shape), *shape)


def offsets(box: Box) -> Box:
    """Where a box begins, in each dimension."""
    return box[: len(box) // 2]


def sizes(box: Box) -> Box:
    """How far a box goes, in each dimension."""
    return box[len(box) // 2 :]


def strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Elements from one index to the next, in each dimension."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The elements [start, stop) of a row-major array as boxes, in order; at most two per dimension, less one."""
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
    """Slices whose entries have equally many dimensions."""

    rows: Column
    """Number of each slice."""
    offsets: Matrix
    sizes: Matrix
    shapes: Matrix
    """Of the entries."""
    bytes: Column
    """Raw bytes of each slice."""


def same_dimensions(content: Content, rows: Column) -> Iterator[BoxGroup]:
    """The chosen slices, in groups that fit into matrices."""
    entries, slices = content.entries, content.slices
    of_entry = column(len(shape) for shape in entries.shape)
    dimensions = of_entry[slices.entry]
    ends = np.cumsum(2 * dimensions)
    items = column(ITEM_BYTES[dtype] for dtype in entries.dtype)
    for count in sorted({len(shape) for shape in entries.shape}):
        chosen = rows[dimensions[rows] == count]
        if not len(chosen):
            continue
        boxes = slices.box[(ends[chosen] - 2 * count)[:, None] + np.arange(2 * count)]
        shapes = np.zeros((len(of_entry), count), np.int64)
        for number in np.flatnonzero(of_entry == count):
            shapes[number] = entries.shape[number]
        entry = slices.entry[chosen]
        size = boxes[:, count:]
        yield BoxGroup(chosen, boxes[:, :count], size, shapes[entry], size.prod(axis=1) * items[entry])


def tile(starts: Matrix, lengths: Matrix, shape: Sequence[int]) -> bool:
    """Whether boxes, none empty and all within `shape`, cover it: every element once."""
    if int(lengths.prod(axis=1).sum()) != prod(shape):
        return False
    if len(starts) < 2:
        return True
    if not shape:
        return False
    # Equal volumes cover if no two boxes meet. Sweep along the dimension that tells most of them apart.
    along = max(range(len(shape)), key=lambda dimension: len(np.unique(starts[:, dimension])))
    order = np.argsort(starts[:, along], kind="stable")
    begin, end = starts[order], (starts + lengths)[order]
    left = np.arange(len(order))
    for distance in range(1, len(order)):
        left = left[: np.searchsorted(left, len(order) - distance)]
        left = left[begin[left + distance, along] < end[left, along]]
        if not len(left):
            return True
        right = left + distance
        if bool(((begin[right] < end[left]) & (begin[left] < end[right])).all(axis=1).any()):
            return False
    return True
