"""Checkpoints in the index: pages of them, and which one of a step is current."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import event

from ckptapi.listing import Filter, Sort
from ckptd.index import Database, Index, Listing, Reading, Stamp
from ckptstore.clock import system_clock
from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.names import Attempt, Reference, new_ulid
from tests.conftest import on_both


def _checkpoint(step: int, committed_at: float, run: str = "gpt", state: State = State.COMMITTED) -> Checkpoint:
    return Checkpoint(run, Attempt(step, new_ulid(system_clock())), state, committed_at, manifest_digest="0" * 32)


def _all(database: Database, run: str | None = None) -> list[Checkpoint]:
    return Listing(database).page(Filter(run=run), Sort.RUN, None, 100).checkpoints


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
def test_the_index_keeps_the_stores_time_of_each_outcome(database: Database) -> None:
    index = Index(database)
    listed, announced = _checkpoint(1, 10.0), _checkpoint(2, 20.0)
    index.apply("gpt", Reading([listed, announced], stamps={listed.attempt: Stamp(100, 7210.5)}))
    assert {c.step: c.written_at for c in _all(database)} == {1: 7210.5, 2: 0.0}


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
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
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
def test_stored_bytes_are_summed_by_run_and_ten_minutes(database: Database) -> None:
    index = Index(database)
    times = {"a": (601.0, 1199.0, 1200.0, 0.0, 9000.0, float("inf")), "b": (1201.0,)}
    for run, own in times.items():
        written = [replace(_checkpoint(step, at, run), stored_bytes=2**62) for step, at in enumerate(own)]
        index.apply(run, Reading(written))
    assert sorted(index.stored_over_time(5000.0)) == [("a", 600, 2**63), ("a", 1200, 2**62), ("b", 1200, 2**62)]


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


def test_a_list_of_runs_does_not_read_all_checkpoints(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/index.db", 1)
    index = Index(database)
    for run in "ab":
        index.apply(run, Reading([_checkpoint(step, 5.0, run) for step in (1, 2)]))
    sent: list[tuple[str, Any]] = []

    @event.listens_for(database._engine, "before_cursor_execute")
    def note(_: object, __: object, statement: str, parameters: Any, *___: object) -> None:
        sent.append((statement, parameters))

    assert [s.latest and s.latest.step for s in index.summaries()] == [2, 2]
    assert [c.run for c in index.latest_of_runs(9)] == ["a", "b"]
    reads = [each for each in sent if "FROM checkpoints" in each[0]]
    assert len(reads) == 2
    with database.read() as connection:
        for statement, parameters in reads:
            plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
            assert not [row.detail for row in plan if row.detail.startswith("SCAN checkpoints")]
    database.close()
