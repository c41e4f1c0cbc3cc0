"""Stores that lie about create-only or about the time are found out before anything is deleted; and their speed."""

from __future__ import annotations

from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest

from ckptstore.clock import system_clock
from ckptstore.codecs.chunk_codecs import Buffer
from ckptstore.errors import CorruptObject, InvalidRequest, StoreUnavailable, StoreUnsafe
from ckptstore.format.shards import CHUNK_BYTES
from ckptstore.stores import ObjectReader, RangeReader, Store, open_store
from ckptstore.stores.base import WrappedStore
from ckptstore.stores.checks import MAX_SKEW_S, NUM_OBJECTS, check_store, measure_store, probe_store, run_store_checks
from tests.conftest import every_store
from tests.support.checkpoints import keys
from tests.support.stores import Faults, FaultyStore, MovableClock


class Overwriting(FaultyStore):
    """A server that accepts the condition and ignores it."""

    def __init__(self, store: Store, admits: bool) -> None:
        super().__init__(store, Faults())
        self._admits = admits

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        there = key in keys(self._store)
        self._store.put(key, data)
        return self._admits or not there


@every_store
def test_an_honest_store(store: Store) -> None:
    assert probe_store(store, system_clock).creates_once
    check_store(store, system_clock)
    assert not any(key.endswith(".json") for key in keys(store))


@pytest.mark.parametrize("admits", [True, False])
def test_a_store_that_overwrites(store: Store, admits: bool) -> None:
    with pytest.raises(StoreUnsafe):
        check_store(Overwriting(store, admits), system_clock)
    assert keys(store) == []
    found = run_store_checks(Overwriting(store, admits), system_clock)
    assert [check.name for check in found.checks if not check.ok] == ["create once", "one winner"]
    assert (found.conditional_writes, found.ok, found.races) == (False, False, "0 of 3")


@every_store
def test_what_a_report_says_of_the_client(store: Store, request: pytest.FixtureRequest) -> None:
    found, kind = run_store_checks(store, system_clock), request.node.callspec.params["store"]
    library = {"local": "", "memory": "fsspec", "gcs": "gcsfs", "azure": "adlfs"}.get(kind, "s3fs")
    assert found.client == (f"{library} {version(library)}" if library else "")
    expected = {"local": "a hard link", "memory": "a look, then a write", "gcs": "ifGenerationMatch=0"}
    assert found.create_only == expected.get(kind, "If-None-Match: *")
    assert found.races == "3 of 3"


@pytest.mark.parametrize("ahead_s", [-2 * MAX_SKEW_S, 2 * MAX_SKEW_S])
def test_clocks_that_are_apart(store: Store, ahead_s: float) -> None:
    with pytest.raises(StoreUnsafe, match="ahead of" if ahead_s < 0 else "behind"):
        check_store(store, MovableClock(ahead_s))
    found = run_store_checks(store, MovableClock(ahead_s))
    assert [check.name for check in found.checks if not check.ok] == ["clock"]
    assert found.clock_skew_s == pytest.approx(-ahead_s, abs=60)
    check_store(store, MovableClock(ahead_s / 4))


LEAST = NUM_OBJECTS * CHUNK_BYTES


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_speeds_of_what_was_written_and_read(tmp_path: Path, kind: str) -> None:
    store = open_store(str(tmp_path) if kind == "file" else "memory://speed")
    seen: list[int] = []
    found = measure_store(store, system_clock, LEAST, seen.append)
    assert (found.store, found.num_objects, found.num_bytes) == (store.url, NUM_OBJECTS, LEAST)
    assert found.write_bytes_per_s > 0
    assert found.read_bytes_per_s > 0
    assert (sum(seen), keys(store)) == (2 * LEAST, [])


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
    assert keys(store) == []


def test_a_store_that_fails_is_left_clean() -> None:
    store = open_store("memory://failing")
    found = run_store_checks(FaultyStore(store, Faults(0)), system_clock)
    assert ([check.ok for check in found.checks], found.conditional_writes) == ([False], False)
    for fail_at in (0, 2, 5):
        with pytest.raises(StoreUnavailable):
            measure_store(FaultyStore(store, Faults(fail_at)), system_clock, LEAST)
        assert keys(store) == []


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
    assert keys(store) == []


def test_few_bytes_measure_nothing() -> None:
    with pytest.raises(InvalidRequest, match="32 MiB"):
        measure_store(open_store("memory://few"), system_clock, 1000)
