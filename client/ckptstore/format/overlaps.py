"""Overlaps of saved slices and requested boxes, computed on whole columns. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from msgspec import Struct

from ckptstore.errors import CorruptObject
from ckptstore.format import boxes
from ckptstore.format.boxes import Box, BoxGroup, Matrix
from ckptstore.format.columns import Column, column
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
    shapes, dimensions = content.entries.shape, column(map(len, content.entries.shape))
    tilings = boxes.Tilings(len(shapes))
    for group in boxes.same_dimensions(content, np.arange(len(content.slices.entry)), boxes.BLOCK):
        filled = np.flatnonzero(group.bytes)
        tilings.add(content.slices.entry[group.rows[filled]], group.offsets[filled], group.sizes[filled])
    for count in set(dimensions.tolist()):
        numbers = column(n for n in np.flatnonzero(dimensions == count).tolist() if 0 not in shapes[n])
        wanted = np.array([shapes[n] for n in numbers.tolist()], np.int64).reshape(len(numbers), count)
        if len(bad := tilings.untiled(numbers, wanted)):
            raise _gap(content.entries.name[int(bad[0])])


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
    blocks = boxes.same_dimensions(content, np.flatnonzero(want_of[slices.entry] >= 0), boxes.BLOCK)
    for dimensions, groups in groupby(blocks, key=lambda group: group.shapes.shape[1]):
        goals = np.zeros((max(wanted) + 1, 2 * dimensions), np.int64)
        mine = [number for number, box in wanted.items() if len(box) == 2 * dimensions]
        goals[mine] = [wanted[number] for number in mine]
        found = _meet(groups, want_of[slices.entry], goals)
        _check_tiling(wants, found)
        missing.difference_update(found.want.tolist())
        yield found
    if gaps := [number for number in missing if 0 not in boxes.sizes(wanted[number])]:
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
