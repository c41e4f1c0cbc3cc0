"""Overlaps of saved slices and requested boxes, computed on whole columns. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import Struct

from ckptstore.errors import CorruptObject
from ckptstore.format import boxes
from ckptstore.format.boxes import Box, BoxGroup, Matrix
from ckptstore.format.columns import Column
from ckptstore.format.documents import Content


class Want(Struct, frozen=True, gc=False):
    """A requested box of an entry, and the buffer for its row-major bytes."""

    entry: str
    box: Box | None
    """None: the whole entry."""
    buffer: str
    at: int = 0
    """Byte offset of the box in the buffer."""


@dataclass(frozen=True, slots=True)
class Overlaps:
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
    names, shapes = content.entries.name, content.entries.shape
    uncovered = {entry for entry, shape in enumerate(shapes) if 0 not in shape}
    for group in boxes.same_dimensions(content, np.arange(len(content.slices.entry))):
        filled = np.flatnonzero(group.bytes)
        entry = content.slices.entry[group.rows[filled]]
        wanted = np.zeros((len(shapes), group.offsets.shape[1]), np.int64)
        wanted[entry] = group.shapes[filled]
        bad = boxes.untiled(entry, group.offsets[filled], group.sizes[filled], wanted)
        uncovered -= set(np.flatnonzero(np.bincount(entry)).tolist()) - set(bad.tolist())
    if uncovered:
        raise _gap(names[min(uncovered)])


def _layers(wants: Sequence[Want]) -> list[list[int]]:
    """The numbers of the wants in lists, each of which has an entry at most once."""
    if len({want.entry for want in wants}) == len(wants):
        return [list(range(len(wants)))]
    layers: list[list[int]] = []
    count: dict[str, int] = {}
    for number, want in enumerate(wants):
        depth = count.get(want.entry, 0)
        count[want.entry] = depth + 1
        if depth == len(layers):
            layers.append([])
        layers[depth].append(number)
    return layers


def _layer(
    content: Content, wants: Sequence[Want], numbers: Sequence[int], entry_of: Sequence[int]
) -> Iterator[Overlaps]:
    shapes, slices = content.entries.shape, content.slices
    wanted = {
        number: boxes.whole(shapes[entry]) if (box := wants[number].box) is None else box
        for number, entry in zip(numbers, entry_of, strict=True)
    }
    missing = set(wanted)
    want_of = np.full(len(shapes), -1)
    want_of[entry_of] = numbers
    for group in boxes.same_dimensions(content, np.flatnonzero(want_of[slices.entry] >= 0)):
        found = _meet(group, want_of[slices.entry[group.rows]], wanted)
        _check_tiling(wants, found)
        missing.difference_update(found.want.tolist())
        yield found
    if gaps := [number for number in missing if 0 not in boxes.sizes(wanted[number])]:
        raise _gap(wants[min(gaps)].entry)


def _meet(group: BoxGroup, numbers: Column, wanted: dict[int, Box]) -> Overlaps:
    """The overlaps of one group of slices, in the order of the wants. numbers: the want of each slice's entry."""
    dimensions = group.offsets.shape[1]
    used = np.flatnonzero(np.bincount(numbers))
    box = np.zeros((int(used.max(initial=-1)) + 1, 2 * dimensions), np.int64)
    box[used] = np.array([wanted[number] for number in used.tolist()], np.int64).reshape(len(used), 2 * dimensions)
    meet = np.arange(len(numbers))
    for at in range(dimensions):  # most slices are outside of the box in the one dimension that is sharded
        begin, wanted_at = group.offsets[meet, at], box[:, at][numbers[meet]]
        ends = begin + group.sizes[meet, at], wanted_at + box[:, dimensions + at][numbers[meet]]
        meet = meet[np.maximum(begin, wanted_at) < np.minimum(*ends)]
    meet = meet[np.argsort(numbers[meet], kind="stable")]
    slices, goals = group.boxes[meet], box[numbers[meet]]
    low = np.maximum(slices[:, :dimensions], goals[:, :dimensions])
    ends = slices[:, :dimensions] + slices[:, dimensions:], goals[:, :dimensions] + goals[:, dimensions:]
    common = np.concatenate([low, np.minimum(*ends) - low], axis=1)
    return Overlaps(numbers[meet], group.rows[meet], slices, goals, common)


def _check_tiling(wants: Sequence[Want], found: Overlaps) -> None:
    """Raises CorruptObject unless the overlaps cover each requested box exactly."""
    used, place, times = np.unique(found.want, return_inverse=True, return_counts=True)
    # A single slice that covers the whole box is the common case, and needs no further check.
    parts = np.flatnonzero((times[place] > 1) | (found.box != found.wanted).any(axis=1))
    if not len(parts):
        return
    used, place = np.unique(found.want[parts], return_inverse=True)
    dimensions = found.box.shape[1] // 2
    wanted = np.zeros((len(used), 2 * dimensions), np.int64)
    wanted[place] = found.wanted[parts]
    box = found.box[parts]
    begin, sizes = wanted[:, :dimensions], wanted[:, dimensions:]
    for bad in boxes.untiled(place, box[:, :dimensions] - begin[place], box[:, dimensions:], sizes).tolist():
        raise _gap(wants[int(used[bad])].entry)


def _gap(entry: str) -> CorruptObject:
    return CorruptObject(
        f"the slices of entry {entry!r} leave a gap or overlap",
        "The checkpoint was written by a faulty program; use another one",
    )
