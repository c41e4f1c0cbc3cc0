"""How a collection reads the outcomes of checkpoints that stay: each once, several at a time."""

from __future__ import annotations

import threading
from collections import Counter

from ckptstore.retention.deletion import TOMBSTONE_KEPT_S, collect
from ckptstore.run import Run
from ckptstore.stores import Store
from ckptstore.stores.base import WrappedStore
from tests.support.clocked import DictStore, FakeClock
from tests.support.runs import RUN, steps, write


class _Meeting(WrappedStore):
    """Each read of an outcome waits until another one is under way."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.read: Counter[str] = Counter()
        self._two = threading.Barrier(2)

    def get(self, key: str) -> bytes:
        if "/commits/" in key:
            self.read[key] += 1
            self._two.wait(30)
        return super().get(key)


def test_outcomes_of_checkpoints_that_stay_are_read_once_and_in_parallel() -> None:
    clock = FakeClock()
    store = DictStore(clock)
    write(store, *range(8))
    clock.now += 2 * TOMBSTONE_KEPT_S
    meeting = _Meeting(store)
    done = collect(Run(meeting, RUN, clock))
    assert (done.swept, done.aborted, done.rolled_forward) == ([], [], [])
    assert sorted(meeting.read.values()) == [1] * 8
    assert len(steps(store)) == 8
