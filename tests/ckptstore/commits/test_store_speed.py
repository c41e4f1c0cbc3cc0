"""Measuring a store: real objects, which are removed however the measurement ends."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from ckptstore.clock import system_clock
from ckptstore.commits.store_speed import NUM_OBJECTS, measure_store
from ckptstore.errors import CorruptObject, InvalidRequest, StoreUnavailable
from ckptstore.format.shards import CHUNK_BYTES
from ckptstore.stores import ObjectReader, RangeReader, Store, open_store
from ckptstore.stores.wrapping import WrappedStore
from tests.support.stores import Faults, FaultyStore

LEAST = NUM_OBJECTS * CHUNK_BYTES


def left(store: Store) -> list[str]:
    return [info.key for info in store.list("")]


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_speeds_of_what_was_written_and_read(tmp_path: Path, kind: str) -> None:
    store = open_store(str(tmp_path) if kind == "file" else "memory://speed")
    seen: list[int] = []
    found = measure_store(store, system_clock, LEAST, seen.append)
    assert found.store == store.url
    assert (found.num_objects, found.num_bytes) == (NUM_OBJECTS, LEAST)
    assert found.write_bytes_per_s > 0
    assert found.read_bytes_per_s > 0
    assert sum(seen) == 2 * LEAST
    assert left(store) == []


@pytest.mark.parametrize("after", [1, NUM_OBJECTS - 1, NUM_OBJECTS + 1])
def test_an_interrupt_leaves_nothing(tmp_path: Path, after: int) -> None:
    """Ctrl-C in the middle of the first object, of the last one, and of the reads."""
    store = open_store(str(tmp_path))
    seen: list[int] = []

    def interrupt(count: int) -> None:
        seen.append(count)
        if len(seen) == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_store(store, system_clock, LEAST, interrupt)
    assert left(store) == []


def test_a_store_that_fails_is_left_clean() -> None:
    store = open_store("memory://failing")
    for fail_at in (0, 2, 5):
        with pytest.raises(StoreUnavailable):
            measure_store(FaultyStore(store, Faults(fail_at)), system_clock, LEAST)
        assert left(store) == []


class Forgetful(WrappedStore):
    """Returns zeros."""

    def read_into(self, key: str, offset: int, buffer: memoryview) -> int:
        buffer[:] = bytes(len(buffer))
        return len(buffer)

    def open_reader(self, key: str) -> ObjectReader:
        return RangeReader(partial(self.get_range, key))


def test_other_bytes_are_not_a_speed() -> None:
    store = open_store("memory://forgetful")
    with pytest.raises(CorruptObject, match="probe"):
        measure_store(Forgetful(store), system_clock, LEAST)
    assert left(store) == []


def test_few_bytes_measure_nothing() -> None:
    with pytest.raises(InvalidRequest, match="32 MiB"):
        measure_store(open_store("memory://few"), system_clock, 1000)
