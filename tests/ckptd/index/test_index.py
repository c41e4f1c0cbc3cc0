"""The index as a database, and its rules without a process around it."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptd.housekeeping.recovery import Recovery
from ckptd.index import Database, Filter, Index, Listing, Reading, Sort
from ckptd.index.tables import METADATA
from ckptd.metrics import Metrics
from ckptd.services.freshness import Freshness
from ckptd.services.synchronizing import Synchronizing
from ckptstore.clock import system_clock
from ckptstore.commits.catalog import Checkpoint, State, list_checkpoints
from ckptstore.errors import IndexUnavailable, StoreUnavailable, UnsupportedFormat
from ckptstore.names import Attempt, Reference, new_ulid
from ckptstore.retention.deletion import delete_checkpoint
from ckptstore.run import Run
from ckptstore.stores import Store
from tests.conftest import DATABASE_KINDS
from tests.support.checkpoints import write_checkpoint, write_rank
from tests.support.stores import Faults, FaultyStore, MovableClock

_T = TypeVar("_T")


@pytest.fixture
def database(db_url: str) -> Iterator[Database]:
    database = Database(db_url, 20)
    yield database
    database.close()


on_both = pytest.mark.parametrize("db_url", DATABASE_KINDS, indirect=True)


def _checkpoint(step: int, committed_at: float, run: str = "gpt", state: State = State.COMMITTED) -> Checkpoint:
    return Checkpoint(run, Attempt(step, new_ulid(system_clock())), state, committed_at, manifest_digest="0" * 32)


def _all(database: Database, run: str | None = None) -> list[Checkpoint]:
    return Listing(database).page(Filter(run=run), Sort.RUN, None, 100).checkpoints


def _synchronizing(store: Store, index: Index) -> tuple[Synchronizing, Freshness]:
    freshness = Freshness(system_clock, 60)
    return Synchronizing(store, index, freshness, Metrics(), system_clock), freshness


@on_both
def test_the_migrations_make_the_tables(database: Database) -> None:
    with database.read() as connection:
        differences = compare_metadata(MigrationContext.configure(connection), METADATA)
    assert [difference for difference in differences if "comment" not in str(difference)] == []


def test_sqlite_is_set_up_for_readers_beside_a_writer(database: Database) -> None:
    with database.read() as connection:
        pragmas = [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("journal_mode", "foreign_keys")]
    assert pragmas == ["wal", 1]
    with database.write() as writer:
        writer.exec_driver_sql("INSERT INTO runs VALUES ('unfinished', 1, 0, 0, NULL, NULL, NULL)")
        assert Index(database).versions() == {}
    assert Index(database).versions() == {"unfinished": 1}


@on_both
def test_many_writers_wait_for_each_other(database: Database) -> None:
    index = Index(database)

    def write(number: int) -> None:
        for step in range(5):
            index.apply(f"run-{number % 3}", Reading([_checkpoint(step, number, f"run-{number % 3}")]))

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(write, range(12)))
    assert [(s.num_checkpoints, s.latest and s.latest.committed_at) for s in index.summaries()] == [
        (20, 9.0),
        (20, 10.0),
        (20, 11.0),
    ]


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "index.db").write_bytes(b"not a database, but long enough to be taken for one" * 100)
    with pytest.raises(IndexUnavailable, match="delete the database"):
        Database(f"sqlite:///{tmp_path / 'index.db'}", 2)


def test_a_database_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    Database(f"sqlite:///{tmp_path / 'index.db'}", 2).close()
    with sqlite3.connect(tmp_path / "index.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    with pytest.raises(IndexUnavailable, match="newer ckptd"):
        Database(f"sqlite:///{tmp_path / 'index.db'}", 2)


@on_both
def test_positions_lead_through_equal_steps_and_times(database: Database) -> None:
    index = Index(database)
    written = [_checkpoint(step, at, run) for run in "ab" for step in (1, 2) for at in (5.0, 5.0, 0.1 + 0.2)]
    for run in "ab":
        index.apply(run, Reading([checkpoint for checkpoint in written if checkpoint.run == run]))
    whole = _all(database)
    assert len(whole) == 12
    found: list[Checkpoint] = []
    after = None
    for _ in range(len(whole)):
        page = Listing(database).page(Filter(), Sort.RUN, after, 1)
        found += page.checkpoints
        after = page.next
    assert found == whole
    assert after is None
    assert [(c.run, -c.step) for c in found] == sorted((c.run, -c.step) for c in found)


@on_both
def test_what_supersedes_what_follows_every_change(database: Database) -> None:
    index = Index(database)
    old, new = _checkpoint(1, 10.0), _checkpoint(1, 20.0)
    broken = replace(_checkpoint(1, 0.0), state=State.CORRUPT)
    index.apply("gpt", Reading([new]))
    index.apply("gpt", Reading([old, broken]))
    assert [c.state for c in _all(database, "gpt")] == [State.COMMITTED, State.SUPERSEDED, State.CORRUPT]
    index.apply("gpt", Reading(gone=[new.attempt]))
    assert index.find(Reference("gpt", 1)) == old
    assert [c.state for c in _all(database, "gpt")] == [State.COMMITTED, State.CORRUPT]


@on_both
@given(drawn=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans()), max_size=12))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_order_of_changes_gives_the_same_states(database: Database, drawn: list[tuple[int, int, bool]]) -> None:
    index = Index(database)
    states = {False: State.COMMITTED, True: State.CORRUPT}
    checkpoints = [_checkpoint(step, at, state=states[bad]) for step, at, bad in drawn]
    answers = []
    for order in (checkpoints, checkpoints[::-1]):
        index.drop_runs(index.versions())
        for checkpoint in order:
            index.apply("gpt", Reading([checkpoint]))
        answers.append(_all(database, "gpt"))
    assert answers[0] == answers[1]


@on_both
def test_a_round_that_fails_at_any_call_removes_nothing(store: Store, database: Database) -> None:
    for step in (1, 1, 2):
        write_checkpoint(store, step=step, arrays={})
    write_checkpoint(store, "bert", 1, arrays={})
    index = Index(database)
    counting = Faults()
    _synchronizing(FaultyStore(store, counting), index)[0].round()
    before = _all(database)
    assert before == [*list_checkpoints(Run(store, "bert")), *list_checkpoints(Run(store, "gpt"))]
    assert len(counting.calls) > 8
    for call in range(len(counting.calls)):
        for reread in (False, True):
            synchronizing, freshness = _synchronizing(FaultyStore(store, Faults(fail_at=call)), index)
            if reread:
                try:
                    synchronizing.reindex()
                except StoreUnavailable:
                    pass
            else:
                synchronizing.round()
            assert _all(database) == before, call
    synchronizing, freshness = _synchronizing(store, index)
    synchronizing.round()
    assert freshness.problem() == ""


def test_a_volume_unmounted_between_two_listings_is_no_deletion(
    store: Store, database: Database, tmp_path: Path
) -> None:
    write_checkpoint(store, arrays={})
    index = Index(database)
    _synchronizing(store, index)[0].round()
    before = _all(database)

    @dataclass
    class Unmounting(Faults):
        def around(self, what: str, call: Callable[[], _T]) -> _T:
            if what == "list gpt/commits/" and (tmp_path / "store").exists():
                (tmp_path / "store").rename(tmp_path / "away")
            return super().around(what, call)

    synchronizing, _ = _synchronizing(FaultyStore(store, Unmounting()), index)
    with pytest.raises(StoreUnavailable, match="while it was listed"):
        synchronizing.sync_run("gpt")
    assert _all(database) == before


def test_a_live_committer_is_given_time(store: Store) -> None:
    clock = MovableClock()
    recovery = Recovery(store, clock, 5)
    attempt = Attempt(1, new_ulid(clock()))
    write_rank(store, "gpt", attempt, {}, 0, world_size=2)
    assert recovery.advance_run("gpt") == []
    clock.advance(6)
    assert recovery.advance_run("gpt") == []
    write_rank(store, "gpt", attempt, {}, 1, world_size=2)
    assert recovery.advance_run("gpt") == []
    clock.advance(4)
    assert recovery.advance_run("gpt") == []
    clock.advance(2)
    assert recovery.advance_run("gpt") == [attempt]
    assert recovery.advance_run("gpt") == []


@on_both
def test_outcomes_are_read_once(store: Store, database: Database) -> None:
    kept = [write_checkpoint(store, step=step, arrays={}) for step in range(5)]
    counting = Faults()
    synchronizing, _ = _synchronizing(FaultyStore(store, counting), Index(database))
    synchronizing.round()
    delete_checkpoint(Run(store, kept[0].run), kept[0].attempt, "test")
    counting.calls.clear()
    for _ in range(3):
        synchronizing.round()
    assert [call for call in counting.calls if call.startswith("get")] == []
    assert len(_all(database, "gpt")) == 4


def test_what_is_believed_follows_the_last_listings() -> None:
    clock = MovableClock()
    freshness = Freshness(clock, 60)
    failure = StoreUnavailable("down")

    def believed(run: str | None, found: bool) -> bool:
        try:
            freshness.check(run, found)
        except StoreUnavailable:
            return False
        return True

    assert not believed("a", True)
    freshness.report(clock(), ["a", "b"], {"b": failure})
    assert believed("a", True)
    assert believed("a", False)
    assert not believed("b", True)
    assert not believed("b", False)
    assert not believed(None, True)
    freshness.report(clock(), ["a", "b"], {})
    assert believed(None, False)
    freshness.report_failure(failure)
    assert believed("b", True)
    assert not believed("b", False)
    assert freshness.problem() == "down"
    freshness.report(clock(), ["a", "b"], {})
    clock.advance(61)
    assert believed("a", True)
    assert not believed("a", False)
    assert freshness.lag_s() == pytest.approx(61, abs=30)


def test_a_newer_format_is_passed_on_instead_of_an_older_step() -> None:
    freshness = Freshness(system_clock, 60)
    freshness.report(system_clock(), ["a", "b"], {})
    freshness.report(system_clock(), ["a", "b"], {"a": UnsupportedFormat("version 9", "Upgrade ckptd")})
    with pytest.raises(UnsupportedFormat):
        freshness.check("a", True)
    freshness.check("b", True)


def test_the_daemon_never_loads_torch() -> None:
    code = "import sys, ckptd.commands; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
