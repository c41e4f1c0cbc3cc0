"""Who leads: never two, soon another one, and nothing by one that was overtaken."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from ckptd.housekeeping.leadership import Leadership, LeaderStore
from ckptd.index import Database, LeaderIndex, Tenure
from ckptstore.errors import IndexUnavailable, LeadershipLost
from ckptstore.stores import Store
from tests.conftest import DATABASE_KINDS
from tests.support.stores import FaultyStore, Interleaving

LEASE_S = 10.0
_T = TypeVar("_T")
on_both = pytest.mark.parametrize("db_url", DATABASE_KINDS, indirect=True)


@dataclass
class Time:
    """A monotonic clock that only tests move."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds


class World:
    """Some daemons on one database. While one waits for the database, time passes, and those awake do their rounds."""

    def __init__(self, database: Database, count: int) -> None:
        self.time = Time()
        self.indexes = [SlowIndex(database, self) for _ in range(count)]
        self.daemons = [Leadership(index, LEASE_S, self.time) for index in self.indexes]
        self.awake: set[int] = set()
        self._busy: set[int] = set()

    def run_once(self, who: int, slow: int = 0, before: float = 0.0, after: float = 0.0) -> None:
        """One round of one daemon. slow: which of its calls of the database takes so long."""
        self._busy.add(who)
        self.indexes[who].delays = [(0.0, 0.0)] * slow + [(before, after)]
        self.daemons[who].run_once()
        self.indexes[who].delays = []
        self._busy.discard(who)
        self.check()

    def pass_(self, seconds: float) -> None:
        end = self.time.now + seconds
        while self.time.now < end:
            self.time.pass_(min(LEASE_S / 10, end - self.time.now))
            self.check()
            for who in sorted(self.awake - self._busy):
                self.run_once(who)

    def check(self) -> None:
        assert sum(daemon.leads() for daemon in self.daemons) <= 1


class SlowIndex(LeaderIndex):
    """One whose next calls take as long as the test says: before they take place, and after."""

    def __init__(self, database: Database, world: World) -> None:
        super().__init__(database, "janitor")
        self._world = world
        self.delays: list[tuple[float, float]] = []

    def look(self) -> Tenure:
        return self._slowly(super().look)

    def claim(self, holder: str, seen: Tenure) -> int | None:
        return self._slowly(lambda: super(SlowIndex, self).claim(holder, seen))

    def renew(self, holder: str) -> int | None:
        return self._slowly(lambda: super(SlowIndex, self).renew(holder))

    def _slowly(self, call: Callable[[], _T]) -> _T:
        before, after = self.delays.pop(0) if self.delays else (0.0, 0.0)
        self._world.pass_(before)
        found = call()
        self._world.pass_(after)
        return found


class LosingReplies(LeaderIndex):
    """The claim takes place, and its reply is lost."""

    def claim(self, holder: str, seen: Tenure) -> int | None:
        super().claim(holder, seen)
        raise IndexUnavailable("the reply was lost")


@pytest.fixture
def database(db_url: str) -> Iterator[Database]:
    database = Database(db_url, 10)
    yield database
    database.close()


def _pair(database: Database, time: Time) -> tuple[Leadership, Leadership]:
    first, second = (Leadership(LeaderIndex(database, "janitor"), LEASE_S, time) for _ in range(2))
    first.run_once()
    second.run_once()
    assert (first.leads(), second.leads()) == (True, False)
    return first, second


@on_both
def test_a_leader_that_shows_signs_of_life_stays(database: Database) -> None:
    time = Time()
    first, second = _pair(database, time)
    for _ in range(50):
        time.pass_(first.every_s)
        first.run_once()
        second.run_once()
        assert (first.leads(), second.leads()) == (True, False)


@on_both
def test_another_one_leads_within_the_lease_and_not_before_the_first_has_stopped(database: Database) -> None:
    time = Time()
    first, second = _pair(database, time)
    gone_at = time.now
    while not second.leads():
        time.pass_(second.every_s)
        assert not (first.leads() and second.leads())
        second.run_once()
    assert not first.leads()
    assert time.now - gone_at <= LEASE_S
    first.run_once()
    assert (first.leads(), second.leads()) == (False, True)


def test_one_that_leaves_is_followed_at_once(database: Database) -> None:
    first, second = _pair(database, Time())
    first.close()
    second.run_once()
    assert (first.leads(), second.leads()) == (False, True)


def test_a_claim_whose_reply_was_lost_is_found_by_the_next_round(database: Database) -> None:
    leadership = Leadership(LosingReplies(database, "janitor"), LEASE_S, Time())
    leadership.run_once()
    assert not leadership.leads()
    leadership.run_once()
    assert leadership.leads()


_seconds = st.sampled_from([0.0, 0.5, 2.6, 4.9, 7.6, 12.0])
_steps = st.tuples(st.integers(0, 2), st.sets(st.integers(0, 2)), st.integers(0, 1), _seconds, _seconds, _seconds)


@given(st.lists(_steps, min_size=3, max_size=10))
@example([(0, {1}, 1, 0.0, 12.0, 0.0)])  # a claim whose reply comes too late
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_there_are_never_two_leaders(
    database: Database, steps: list[tuple[int, set[int], int, float, float, float]]
) -> None:
    """Any daemon may be stopped anywhere, before and after what it does in the database, for any time."""
    with database.write() as connection:
        connection.execute(text("DELETE FROM leaders"))
    world = World(database, 3)
    for who, awake, slow, before, after, pause in steps:
        world.awake = awake
        world.run_once(who, slow, before, after)
        world.pass_(pause)


@on_both
def test_one_that_was_overtaken_writes_nothing(database: Database) -> None:
    time = Time()
    first, second = _pair(database, time)
    fenced = database.fenced(first.fence)
    with fenced.write() as connection:
        connection.execute(text("UPDATE revision SET value = 1"))
    time.pass_(LEASE_S)
    with pytest.raises(LeadershipLost), fenced.write():
        pass  # its own clock says so
    second.run_once()
    # As if it had looked at its clock just before it was stopped: the database says so.
    time.now -= LEASE_S
    assert first.leads()
    with pytest.raises(LeadershipLost), fenced.write() as connection:
        connection.execute(text("UPDATE revision SET value = 2"))
    with database.read() as connection:
        assert connection.scalar(text("SELECT value FROM revision")) == 1


@on_both
def test_no_daemon_takes_over_in_the_middle_of_a_fenced_transaction(database: Database) -> None:
    time = Time()
    first, second = _pair(database, time)
    taking_over = threading.Thread(target=second.run_once)
    with database.fenced(first.fence).write() as connection:
        time.pass_(LEASE_S)
        taking_over.start()
        taking_over.join(0.3)
        assert not second.leads()
        connection.execute(text("UPDATE revision SET value = 1"))
    taking_over.join()
    second.run_once()  # on PostgreSQL the claim had waited, and may have given up
    assert second.leads()


@pytest.mark.parametrize("count", [5, 300])
def test_deletes_stop_where_the_lead_is_lost(database: Database, store: Store, tmp_path: Path, count: int) -> None:
    time = Time()
    leadership, _ = _pair(database, time)
    keys = [f"run/attempts/x/{number:03d}" for number in range(count)]
    for key in keys:
        store.put(key, b"x")

    class Stopped(FaultyStore):
        """Hands keys on in one call, as a store does."""

        def delete_many(self, keys: Iterator[str]) -> None:  # type: ignore[override]
            self._store.delete_many(self._hand_on(keys))

        def _hand_on(self, keys: Iterator[str]) -> Iterator[str]:
            for key in keys:
                yield key
                if key.endswith("3"):
                    time.pass_(LEASE_S)

    with pytest.raises(LeadershipLost):
        LeaderStore(Stopped(store, Interleaving(-1, lambda: None)), leadership).delete_many(keys)
    assert [info.key for info in store.list("")] == keys[4:]


def test_one_that_does_not_lead_cannot_change_the_store(database: Database, store: Store) -> None:
    store.put("key", b"x")
    _, follower = _pair(database, Time())
    guarded = LeaderStore(store, follower)
    changes: list[Callable[[], object]] = [
        lambda: guarded.put("a", b""),
        lambda: guarded.put_if_absent("a", b""),
        lambda: guarded.open_writer("a"),
        lambda: guarded.delete_many(["key"]),
        lambda: guarded.abort_uploads("", 0.0),
    ]
    for change in changes:
        with pytest.raises(LeadershipLost):
            change()
    assert guarded.get("key") == b"x"
    assert [info.key for info in guarded.list("")] == ["key"]
