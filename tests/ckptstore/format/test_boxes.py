"""Boxes against numpy, and tilings against a painter who paints every element."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.format import boxes
from ckptstore.format.boxes import Box, Matrix, Tilings, flat_boxes
from ckptstore.format.columns import Column, column
from tests.support.layouts import cut, region, tilings

SHAPES = st.lists(st.integers(0, 5), max_size=4)


@given(SHAPES, st.data())
def test_a_range_of_elements_is_a_few_boxes(shape: list[int], data: st.DataObject) -> None:
    stop = data.draw(st.integers(0, prod(shape)))
    start = data.draw(st.integers(0, stop))
    found, numbers = flat_boxes(shape, start, stop), np.arange(prod(shape)).reshape(shape)
    assert [n for box in found for n in numbers[region(box)].reshape(-1).tolist()] == list(range(start, stop))
    assert all(len(box) == 2 * len(shape) and 0 not in boxes.sizes(box) for box in found)
    assert len(found) <= max(1, 2 * len(shape) - 1)


@given(SHAPES)
def test_strides_are_numpys(shape: list[int]) -> None:
    if prod(shape):
        assert boxes.strides(shape) == tuple(n for n in np.zeros(shape, np.uint8).strides)
    assert boxes.sizes(boxes.whole(shape)) == tuple(shape)
    assert boxes.offsets(boxes.whole(shape)) == (0,) * len(shape)


def paints(found: list[Box], shape: list[int]) -> bool:
    painted = np.zeros(shape, int)
    for box in found:
        painted[region(box)] += 1
    return bool((painted == 1).all())


def untiled(groups: Column, starts: Matrix, lengths: Matrix, shapes: Matrix) -> Column:
    known = Tilings(len(shapes))
    known.add(groups, starts, lengths)
    return known.untiled(np.arange(len(shapes)), shapes)


def tiles(found: Sequence[Box], shape: Sequence[int]) -> bool:
    matrix = np.array(found, np.int64).reshape(len(found), 2 * len(shape))
    shapes = np.array(shape, np.int64).reshape(1, len(shape))
    starts, lengths = matrix[:, : len(shape)], matrix[:, len(shape) :]
    return not len(untiled(np.zeros(len(found), np.int64), starts, lengths, shapes))


@given(st.data())
def test_tilings_and_what_is_almost_one(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), max_size=4))
    found = [box for box in data.draw(tilings(shape)) if 0 not in boxes.sizes(box)]
    data.draw(st.randoms()).shuffle(found)
    assert tiles(found, shape)
    assert paints(found, shape)
    for _ in range(data.draw(st.integers(0, 2), label="changes")):
        victim = data.draw(st.integers(0, len(found) - 1))
        other = data.draw(st.sampled_from(found))
        sizes = boxes.sizes(other)
        moved = tuple(data.draw(st.integers(0, whole - size)) for whole, size in zip(shape, sizes, strict=True))
        found[victim] = (*moved, *sizes)  # often of the volume of the one that it replaces
    assert tiles(found, shape) == paints(found, shape)


def test_overlaps_of_equal_volume() -> None:
    assert not tiles([(0, 0, 1, 2), (0, 0, 1, 2)], [2, 2]), "one twice, one never"
    assert not tiles([(0, 0, 2, 1), (0, 0, 1, 2)], [2, 2]), "they cross"
    assert not tiles([()] * 2, [])
    assert not tiles([], [])
    assert not tiles([(0, 1), (1, 1), (1, 1)], [3])
    pinwheel = [(0, 0, 1, 2), (0, 2, 2, 1), (2, 1, 1, 2), (1, 0, 2, 1), (1, 1, 1, 1)]
    assert tiles(pinwheel, [3, 3]), "no line cuts it in two"
    assert not tiles([*pinwheel[:4], (0, 0, 1, 1)], [3, 3])


def test_each_group_is_judged_alone() -> None:
    starts, lengths = (np.array(rows, np.int64) for rows in ([[0], [0], [2], [5], [0]], [[4], [2], [3], [1], [2]]))
    shapes = np.array([[4], [6], [3], [7]], np.int64)
    assert untiled(column([0, 1, 1, 1, 2]), starts, lengths, shapes).tolist() == [2, 3]


@pytest.mark.timeout(120)  # in quadratic time it would be an hour
@pytest.mark.parametrize("cuts", [[512, 512], [2] * 18], ids=["a grid", "a corner in each of 18 dimensions"])
def test_many_boxes_take_linear_time(cuts: list[int]) -> None:
    shape = [3 * n for n in cuts]
    starts = np.array(list(product(*(range(0, 3 * n, 3) for n in cuts))), np.int64)
    lengths = np.full_like(starts, 3)
    groups, shapes = np.zeros(len(starts), np.int64), np.array([shape], np.int64)
    assert untiled(groups, starts, lengths, shapes).tolist() == []
    starts[len(starts) // 2] = starts[-1]
    assert untiled(groups, starts, lengths, shapes).tolist() == [0]


def test_sizes_near_the_bound_do_not_overflow() -> None:
    half = 1 << 61
    assert tiles([(0, half), (half, half)], [1 << 62])
    assert not tiles([(0, half), (half - 1, half)], [1 << 62])
    assert not tiles([(0, 1 << 62)] * 5, [1 << 62]), "five times 2**62 is 2**62 modulo 2**64"


def test_what_the_strategy_draws_has_more_than_grids() -> None:
    drawn = cut([4, 4], [0.3, 0.7, 0.1, 0.9, 0.5, 0.2], 3)
    assert paints(drawn, [4, 4])
    assert len({box[0] for box in drawn}) > 1
