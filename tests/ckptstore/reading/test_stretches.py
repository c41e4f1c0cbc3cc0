"""Dividing work among threads."""

from __future__ import annotations

from functools import partial
from itertools import chain

import pytest

from ckptstore.reading.fetch import Stretches
from tests.support.stores import race


def take_all(stretches: Stretches[int], thread: int) -> list[int]:
    taken = []
    while (item := stretches.take(thread)) is not None:
        taken.append(item)
    return taken


@pytest.mark.parametrize(("count", "threads"), [(0, 1), (1, 3), (7, 2), (1000, 4)])
def test_every_item_is_taken_once(count: int, threads: int) -> None:
    stretches = Stretches(range(count), threads)
    results = race(*(partial(take_all, stretches, thread) for thread in range(threads)))
    taken = [result for result in results if isinstance(result, list)]
    assert sorted(chain.from_iterable(taken)) == list(range(count))


def test_threads_go_from_front_to_back() -> None:
    stretches = Stretches(range(8), 2)
    order = [(thread, stretches.take(thread)) for thread in (0, 1, 0, 1, 1, 0, 0, 1)]
    assert [item for thread, item in order if thread == 0] == [0, 1, 2, 3]
    assert [item for thread, item in order if thread == 1] == [4, 5, 6, 7]


def test_who_is_done_takes_the_back_half_of_the_longest_rest() -> None:
    stretches = Stretches(range(12), 3)
    assert take_all(stretches, 2)[:4] == [8, 9, 10, 11]
    stretches = Stretches(range(12), 3)
    for _ in range(4):
        stretches.take(2)
    stretches.take(1)
    assert [stretches.take(2) for _ in range(2)] == [2, 3], "of the first, which has most to do"
    assert [stretches.take(0) for _ in range(2)] == [0, 1]
