"""Stores that lie about create-only or about the time are found out before anything is deleted."""

from __future__ import annotations

import pytest

from ckptstore.clock import system_clock
from ckptstore.codecs.chunk_codecs import Buffer
from ckptstore.commits.store_check import MAX_SKEW_S, check_store, probe_store
from ckptstore.errors import StoreUnsafe
from ckptstore.stores import Store
from tests.conftest import STORE_KINDS
from tests.support.runs import keys
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


@pytest.mark.parametrize("store", STORE_KINDS, indirect=True)
def test_an_honest_store(store: Store) -> None:
    assert probe_store(store, system_clock).creates_once
    check_store(store, system_clock)
    assert not any(key.endswith(".json") for key in keys(store))


@pytest.mark.parametrize("admits", [True, False])
def test_a_store_that_overwrites(store: Store, admits: bool) -> None:
    with pytest.raises(StoreUnsafe):
        check_store(Overwriting(store, admits), system_clock)
    assert keys(store) == []


@pytest.mark.parametrize("ahead_s", [-2 * MAX_SKEW_S, 2 * MAX_SKEW_S])
def test_clocks_that_are_apart(store: Store, ahead_s: float) -> None:
    with pytest.raises(StoreUnsafe, match="ahead of" if ahead_s < 0 else "behind"):
        check_store(store, MovableClock(ahead_s))
    check_store(store, MovableClock(ahead_s / 4))
