"""Buffers that go round: never more than there may be, and none again before it is empty."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckpt.restoring.buffers import BufferPool

_PATIENCE_S = 30


class Flag:
    """A mark that is passed when a test says so."""

    def __init__(self, error: Exception | None = None) -> None:
        self._passed = threading.Event()
        self._error = error
        self.waited = threading.Event()

    def done(self) -> bool:
        return self._passed.is_set()

    def wait(self) -> None:
        self.waited.set()
        assert self._passed.wait(_PATIENCE_S)
        if self._error is not None:
            raise self._error

    def go(self) -> None:
        self._passed.set()


def ring_of(count: int) -> BufferPool[int]:
    numbers = iter(range(100))
    return BufferPool(count, lambda: next(numbers))


def test_a_buffer_that_is_empty_is_used_before_another_is_made() -> None:
    ring = ring_of(3)
    first = ring.take()
    ring.give(first, ())
    assert ring.take() == first
    flag = Flag()
    flag.go()
    ring.give(first, [flag])
    assert ring.take() == first


def test_one_that_is_being_emptied_is_left_alone_while_others_can_be_had() -> None:
    ring, flag = ring_of(2), Flag()
    assert ring.take() == 0
    ring.give(0, [flag])
    assert ring.take() == 1
    flag.go()
    assert ring.take() == 0


def test_who_finds_all_in_use_waits_for_the_one_given_first_and_all_its_marks() -> None:
    ring, flags = ring_of(2), [Flag(), Flag(), Flag()]
    assert [ring.take(), ring.take()] == [0, 1]
    ring.give(1, flags[:2])
    ring.give(0, flags[2:])
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(ring.take)
        assert flags[0].waited.wait(_PATIENCE_S)
        flags[0].go()
        assert flags[1].waited.wait(_PATIENCE_S)
        assert not taking.done()
        flags[1].go()
        assert taking.result(_PATIENCE_S) == 1
    assert not flags[2].waited.is_set()


def test_who_finds_all_taken_waits_for_one_to_be_given() -> None:
    ring = ring_of(1)
    taken = ring.take()
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(ring.take)
        ring.give(taken, ())
        assert taking.result(_PATIENCE_S) == taken


def test_a_failure_to_empty_or_to_make_one_leaves_no_thread_waiting() -> None:
    flag = Flag(OSError("the device is gone"))
    made: Iterator[int | Exception] = iter([0, OSError("no memory"), 2])

    def make() -> int:
        found = next(made)
        if isinstance(found, Exception):
            raise found
        return found

    ring = BufferPool(1, make)
    ring.give(ring.take(), [flag])
    flag.go()
    with pytest.raises(OSError, match="device is gone"):
        ring.take()
    with pytest.raises(OSError, match="no memory"):
        ring.take()
    assert ring.take() == 2


def test_drained_means_all_are_empty() -> None:
    ring, flags = ring_of(2), [Flag(), Flag()]
    for number, flag in zip([ring.take(), ring.take()], flags, strict=True):
        ring.give(number, [flag])
    with ThreadPoolExecutor(1) as pool:
        draining = pool.submit(ring.drain)
        flags[0].go()
        assert flags[1].waited.wait(_PATIENCE_S)
        assert not draining.done()
        flags[1].go()
        draining.result(_PATIENCE_S)
    failed = Flag(OSError("the device is gone"))
    failed.go()
    ring.give(ring.take(), [failed])
    with pytest.raises(OSError, match="device is gone"):
        ring.drain()
