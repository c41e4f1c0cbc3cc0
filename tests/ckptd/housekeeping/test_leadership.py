"""Who leads: never two, soon another one, and nothing by one that was overtaken."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from ckptd.housekeeping.leadership import Leadership, LeaderStore
from ckptd.index import Database, LeaderIndex, Tenure
from ckptstore.clock import system_clock
from ckptstore.commits.catalog import list_checkpoints
from ckptstore.errors import IndexUnavailable, LeadershipLost
from ckptstore.names import Attempt, new_ulid
from ckptstore.retention.deletion import hide
from ckptstore.run import Run
from ckptstore.stores import Store
from tests.ckptd.housekeeping.counted_daemon import STOP_AT
from tests.conftest import on_both
from tests.support.checkpoints import write_checkpoint, write_rank
from tests.support.daemons import Daemon, running_daemon
from tests.support.stores import FakeClock, FaultyStore, Interleaving
from tests.support.waiting import wait_until

LEASE_S = 10.0
_T = TypeVar("_T")


class World:
    """Some daemons on one database. While one waits for the database, time passes, and those awake do their rounds."""

    def __init__(self, database: Database, count: int) -> None:
        self.time = FakeClock(1000.0)
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
            self.time.now += min(LEASE_S / 10, end - self.time.now)
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


def _pair(database: Database, time: FakeClock) -> tuple[Leadership, Leadership]:
    first, second = (Leadership(LeaderIndex(database, "janitor"), LEASE_S, time) for _ in range(2))
    first.run_once()
    second.run_once()
    assert (first.leads(), second.leads()) == (True, False)
    return first, second


@on_both
def test_a_leader_that_shows_signs_of_life_stays(database: Database) -> None:
    time = FakeClock(1000.0)
    first, second = _pair(database, time)
    for _ in range(50):
        time.now += first.every_s
        first.run_once()
        second.run_once()
        assert (first.leads(), second.leads()) == (True, False)


@on_both
def test_another_one_leads_within_the_lease_and_not_before_the_first_has_stopped(database: Database) -> None:
    time = FakeClock(1000.0)
    first, second = _pair(database, time)
    gone_at = time.now
    while not second.leads():
        time.now += second.every_s
        assert not (first.leads() and second.leads())
        second.run_once()
    assert not first.leads()
    assert time.now - gone_at <= LEASE_S
    first.run_once()
    assert (first.leads(), second.leads()) == (False, True)


def test_one_that_leaves_is_followed_at_once(database: Database) -> None:
    first, second = _pair(database, FakeClock(1000.0))
    first.close()
    second.run_once()
    assert (first.leads(), second.leads()) == (False, True)


def test_a_claim_whose_reply_was_lost_is_found_by_the_next_round(database: Database) -> None:
    leadership = Leadership(LosingReplies(database, "janitor"), LEASE_S, FakeClock(1000.0))
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
    time = FakeClock(1000.0)
    first, second = _pair(database, time)
    fenced = database.fenced(first.fence)
    with fenced.write() as connection:
        connection.execute(text("UPDATE revision SET value = 1"))
    time.now += LEASE_S
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
    time = FakeClock(1000.0)
    first, second = _pair(database, time)
    taking_over = threading.Thread(target=second.run_once)
    with database.fenced(first.fence).write() as connection:
        time.now += LEASE_S
        taking_over.start()
        taking_over.join(0.3)
        assert not second.leads()
        connection.execute(text("UPDATE revision SET value = 1"))
    taking_over.join()
    second.run_once()  # on PostgreSQL the claim had waited, and may have given up
    assert second.leads()


@pytest.mark.parametrize("count", [5, 300])
def test_deletes_stop_where_the_lead_is_lost(database: Database, store: Store, tmp_path: Path, count: int) -> None:
    time = FakeClock(1000.0)
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
                    time.now += LEASE_S

    with pytest.raises(LeadershipLost):
        LeaderStore(Stopped(store, Interleaving(-1, lambda: None)), leadership).delete_many(keys)
    assert [info.key for info in store.list("")] == keys[4:]


def test_one_that_does_not_lead_cannot_change_the_store(database: Database, store: Store) -> None:
    store.put("key", b"x")
    _, follower = _pair(database, FakeClock(1000.0))
    guarded = LeaderStore(store, follower)
    changes: list[Callable[[], object]] = [
        lambda: guarded.put("a", b""), lambda: guarded.put_if_absent("a", b""), lambda: guarded.open_writer("a"),
        lambda: guarded.delete_many(["key"]), lambda: guarded.abort_uploads("", 0.0),
    ]  # fmt: skip
    for change in changes:
        with pytest.raises(LeadershipLost):
            change()
    assert (guarded.get("key"), [info.key for info in guarded.list("")]) == (b"x", ["key"])


DAEMON_LEASE_S = 3.0
"""For a busy machine. test_leadership.py holds them to the second, by a clock that it moves itself."""
_LEADS = "is now the leader, epoch"
_OPTIONS = ("--leader-lease-seconds", str(DAEMON_LEASE_S), "--collect-seconds", "0.2", "--orphan-grace-seconds", "0")


@pytest.fixture
def daemons() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def _leads(daemon: Daemon) -> bool:
    return _LEADS in daemon.log()


def _is_stopped(daemon: Daemon) -> bool:
    return Path(f"/proc/{daemon.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def _rubbish(store: Store) -> set[str]:
    """Hidden checkpoints and orphans; returns the keys that have to go."""
    run, kept = Run(store, "gpt", by="test"), write_checkpoint(store, step=1000, arrays={})
    before = {info.key for info in store.list("")}
    checkpoints = [write_checkpoint(store, step=step, arrays={}) for step in range(15)]
    for step in range(20, 35):
        write_rank(store, "gpt", Attempt(step, new_ulid(system_clock())), {}, rank=0, world_size=2)
    to_delete = {info.key for info in store.list("")} - before
    assert not hide(run, [c.attempt for c in checkpoints], "test", grace_s=0)
    assert [c.id for c in list_checkpoints(run)] == [kept.id]
    return to_delete


@pytest.mark.parametrize("place", ["after", "before"])
def test_a_leader_stopped_in_a_sweep_sweeps_nothing_when_it_wakes(
    store: Store, postgresql_database: str, tmp_path: Path, daemons: ExitStack, place: str
) -> None:
    to_delete, notes = _rubbish(store), tmp_path / "deletes"

    def start(stop: str) -> Daemon:
        environment = {**os.environ, "CKPTD_TEST_NOTES": str(notes), "CKPTD_TEST_STOP": stop}
        program = ("-m", "tests.ckptd.housekeeping.counted_daemon")
        return daemons.enter_context(
            running_daemon(
                store.url, postgresql_database, options=_OPTIONS, environment=environment, ready=False, program=program
            )
        )

    def deletes() -> list[tuple[int, bool, str]]:
        lines = (line.split() for line in notes.read_text().splitlines())
        return [(int(pid), there == "True", key) for pid, there, key in lines]

    first = start(place)
    wait_until(lambda: _is_stopped(first), "stopping in the middle of a sweep")
    done = len(deletes())
    assert 0 < done <= STOP_AT < len(to_delete)
    second = start("never")
    wait_until(lambda: _leads(second), "taking over")
    wait_until(lambda: to_delete <= {key for _, there, key in deletes() if there}, "finishing the sweep")
    first.process.send_signal(signal.SIGCONT)
    wait_until(lambda: "is not the leader" in first.log(), "noticing that another one leads")
    wait_until(lambda: "another daemon is now the leader" in first.log(), "standing back")

    by_first = [there for pid, there, _ in deletes() if pid == first.process.pid][done:]
    # What was on its way when it was stopped is one delete, of what was gone already.
    assert by_first == ([] if place == "after" else [False])
    swept = Counter(key for _, there, key in deletes() if there)
    assert set(swept.values()) == {1}
    assert [c.step for c in list_checkpoints(Run(store, "gpt"))] == [1000]


def test_a_killed_leader_is_followed_within_a_lease(store: Store, postgresql_database: str, daemons: ExitStack) -> None:
    write_checkpoint(store, step=1, arrays={})
    first = daemons.enter_context(running_daemon(store.url, postgresql_database, options=_OPTIONS))
    wait_until(lambda: _leads(first), "leading")
    second = daemons.enter_context(running_daemon(store.url, postgresql_database, options=_OPTIONS))
    wait_until(lambda: "not known" not in second.get("/").text, "its own account of how the run goes")
    time.sleep(DAEMON_LEASE_S)  # one that watches must not take over from one that lives
    assert not _leads(second) or "is not the leader" in first.log()
    first.kill()
    wait_until(lambda: _leads(second), "taking over")
    attempt = Attempt(3, new_ulid(system_clock()))
    write_rank(store, "gpt", attempt, {})
    wait_until(lambda: second.get("/v1/checkpoints/gpt@3").status_code == 200, "rolling forward")


def test_one_asked_to_stop_is_followed_at_once(store: Store, postgresql_database: str, daemons: ExitStack) -> None:
    slow = ("--leader-lease-seconds", "60")
    first = daemons.enter_context(running_daemon(store.url, postgresql_database, options=slow))
    wait_until(lambda: _leads(first), "leading")
    second = daemons.enter_context(
        running_daemon(store.url, postgresql_database, options=("--leader-lease-seconds", "5"))
    )
    assert first.stop() == 0
    wait_until(lambda: _leads(second), "taking over", 30)
