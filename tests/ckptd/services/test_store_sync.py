"""How the index follows its store: cheaply, from where it stopped, and past others who change the same run."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from ckptapi.listing import Filter, Sort
from ckptd.index import Database, Index, Listing, Reading, RunChanged
from ckptd.metrics import Metrics
from ckptd.services import store_sync as module
from ckptd.services.catalog import Freshness
from ckptd.services.store_sync import IDLE_AFTER_S, IDLE_ROUNDS, PollPlan, StoreSync
from ckptstore.clock import system_clock
from ckptstore.commits.catalog import Checkpoint, State, list_checkpoints
from ckptstore.commits.hidden import record_deleted
from ckptstore.errors import CkptError, NoCheckpoint, StoreUnavailable
from ckptstore.names import Reference, RunKeys
from ckptstore.retention.deletion import delete_checkpoint, hide, undelete
from ckptstore.run import Run
from ckptstore.stores import Store
from tests.conftest import on_both
from tests.support.checkpoints import write_checkpoint
from tests.support.stores import Faults, FaultyStore, Interleaving, MovableClock
from tests.support.waiting import present


def _store_sync(store: Store, database: Database, freshness: Freshness | None = None) -> StoreSync:
    freshness = freshness or Freshness(system_clock, 60)
    return StoreSync(store, Index(database), freshness, Metrics(), system_clock)


def _all(database: Database, run: str | None = None) -> list[Checkpoint]:
    return Listing(database).page(Filter(run=run), Sort.RUN, None, 1000).checkpoints


def test_a_poll_costs_six_listings_per_run(store: Store, database: Database) -> None:
    for run in "ab":
        write_checkpoint(store, run, arrays={})
    counting = Faults()
    store_sync = _store_sync(FaultyStore(store, counting), database)
    for _ in range(2):
        store_sync.run_once()
    counting.calls.clear()
    store_sync.run_once()
    parts = ("commits", "dead", "generations", "labels", "quarantine", "tombstones")
    of_runs = [f"list {run}/{part}/" for run in "ab" for part in parts]
    assert sorted(counting.calls) == sorted(["list_folders ", *of_runs])


def test_a_deleted_checkpoint_is_not_indexed_and_its_list_is_read_once(store: Store, database: Database) -> None:
    old, new = (write_checkpoint(store, "a", step, arrays={}) for step in (1, 2))
    counting = Faults()
    store_sync = _store_sync(FaultyStore(store, counting), database)
    store_sync.run_once()
    assert (_all(database), record_deleted(Run(store, "a"), [old.attempt])) == ([new, old], {old.attempt})
    for _ in range(3):
        store_sync.run_once()
    assert _all(database) == [new]
    assert counting.calls.count(f"get {RunKeys('a').deleted_list(0, 1)}") == 2, "once to remove it, once to compare"
    with pytest.raises(NoCheckpoint):
        store_sync.notify("a", old.attempt)


def test_thinning_and_its_undelete_change_the_index(store: Store, database: Database) -> None:
    arrays = {"model/a": np.ones(9), "optim/a": np.ones(99)}
    old, new = (write_checkpoint(store, "a", step, arrays) for step in (1, 2))
    store_sync, run = _store_sync(store, database), Run(store, "a")
    store_sync.run_once()
    assert hide(run, [old.attempt], "test", thins=True) == {}
    store_sync.run_once()
    found = {c.step: c for c in _all(database)}
    assert (found[2], found[1].state, found[1].thinned) == (new, State.THINNED, True)
    assert found[1].stored_bytes == old.stored_bytes - old.optimizer_bytes
    assert store_sync.notify("a", old.attempt).thinned
    assert Index(database).find(Reference("a", 1)) == found[1]
    assert present(Index(database).find(Reference("a"))).step == 2
    undelete(run, old.attempt)
    store_sync.run_once()
    assert _all(database) == [new, old]


def test_runs_in_which_nothing_happens_are_looked_at_less_often() -> None:
    clock = MovableClock()
    pace, runs = PollPlan(clock), {f"run-{number}": 1 for number in range(50)}
    assert pace.due(runs) == list(runs)
    clock.advance(IDLE_AFTER_S + 1)
    rounds = [pace.due(runs) for _ in range(IDLE_ROUNDS)]
    assert sorted(run for due in rounds for run in due) == sorted(runs)
    assert all(len(due) < 20 for due in rounds)
    runs["run-7"] = 2
    runs["new"] = 1
    for _ in range(IDLE_ROUNDS):
        assert {"run-7", "new"} <= set(pace.due(runs))


@on_both
def test_an_outcome_damaged_after_it_was_read_is_marked(store: Store, database: Database, tmp_path: Path) -> None:
    older, newer = (write_checkpoint(store, step=step, arrays={}) for step in (1, 2))
    store_sync = _store_sync(store, database)
    for _ in range(2):
        store_sync.run_once()
    assert Index(database).latest_of_runs(9) == [newer]
    path = tmp_path / "store" / RunKeys(newer.run).outcome(newer.attempt)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    for _ in range(2):
        store_sync.run_once()
        assert [c.state for c in _all(database)] == [State.CORRUPT, State.COMMITTED]
    assert Index(database).latest_of_runs(9) == [older]
    path.write_bytes(whole)
    store_sync.run_once()
    assert _all(database) == [newer, older]


def test_an_interrupted_reading_is_continued(store: Store, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BATCH", 4)
    for step in range(10):
        write_checkpoint(store, step=step, arrays={})
    # A run's first six calls are listings; then come four outcomes, and the next batch fails.
    with pytest.raises(CkptError):
        _store_sync(FaultyStore(store, Faults(fail_at=10)), database).sync_run("gpt")
    assert [c.step for c in _all(database)] == [9, 8, 7, 6]
    counting = Faults()
    _store_sync(FaultyStore(store, counting), database).sync_run("gpt")
    assert len([call for call in counting.calls if call.startswith("get")]) == 6
    assert _all(database) == list_checkpoints(Run(store, "gpt"))


@on_both
def test_old_news_is_not_written(database: Database) -> None:
    index = Index(database)
    version = index.apply("gpt", Reading(), 0)
    assert index.apply("gpt", Reading(), version) > version
    for expected in (0, version):
        with pytest.raises(RunChanged):
            index.apply("gpt", Reading(), expected)
    index.drop_runs({"gpt": version})
    assert list(index.versions()) == ["gpt"]
    index.drop_runs(index.versions())
    assert index.versions() == {}
    # A run that comes back has no version that was used before.
    assert index.apply("gpt", Reading(), 0) > version + 1


@pytest.mark.parametrize("how", ["notify", "sync_run", "reindex"])
def test_what_another_daemon_removes_at_any_moment_stays_away(store: Store, database: Database, how: str) -> None:
    kept = write_checkpoint(store, step=0, arrays={})
    other, hit = _store_sync(store, database), True
    at = 0
    while hit:
        to_delete = write_checkpoint(store, step=1, arrays={})
        other.sync_run("gpt")

        def delete(to_delete: Checkpoint = to_delete) -> None:
            delete_checkpoint(Run(store, to_delete.run), to_delete.attempt, "test", force=True)
            other.sync_run("gpt")

        interleaving = Interleaving(at, delete)
        one = _store_sync(FaultyStore(store, interleaving), database)
        try:
            if how == "notify":
                one.notify("gpt", to_delete.attempt)
            elif how == "sync_run":
                one.sync_run("gpt")
            else:
                one.reindex()
        except NoCheckpoint:
            assert how == "notify"
        hit = len(interleaving.calls) > at
        assert not hit or _all(database) == [kept], at
        at += 1
    assert at > 3


@on_both
def test_reindexing_while_commits_arrive_loses_none(store: Store, database: Database) -> None:
    store_sync, other = (_store_sync(store, database) for _ in range(2))
    ended = threading.Event()

    def commit() -> None:
        step = 0
        while not ended.is_set():
            step += 1
            run = f"run-{step % 3}"
            other.notify(run, write_checkpoint(store, run, step, arrays={}).attempt)

    committing = threading.Thread(target=commit)
    committing.start()
    try:
        for _ in range(8):
            store_sync.reindex()
            store_sync.run_once()
    finally:
        ended.set()
        committing.join()
    assert _all(database) == [c for run in ("run-0", "run-1", "run-2") for c in list_checkpoints(Run(store, run))]


_T = TypeVar("_T")


@on_both
def test_a_round_that_fails_at_any_call_removes_nothing(store: Store, database: Database) -> None:
    for step in (1, 1, 2):
        write_checkpoint(store, step=step, arrays={})
    write_checkpoint(store, "bert", 1, arrays={})
    counting = Faults()
    _store_sync(FaultyStore(store, counting), database).run_once()
    before = _all(database)
    assert before == [*list_checkpoints(Run(store, "bert")), *list_checkpoints(Run(store, "gpt"))]
    assert len(counting.calls) > 8
    for call in range(len(counting.calls)):
        for reread in (False, True):
            store_sync = _store_sync(FaultyStore(store, Faults(fail_at=call)), database)
            if reread:
                with contextlib.suppress(StoreUnavailable):
                    store_sync.reindex()
            else:
                store_sync.run_once()
            assert _all(database) == before, call
    freshness = Freshness(system_clock, 60)
    _store_sync(store, database, freshness).run_once()
    assert freshness.problem() == ""


def test_a_volume_unmounted_between_listings_is_no_deletion(store: Store, database: Database, tmp_path: Path) -> None:
    write_checkpoint(store, arrays={})
    _store_sync(store, database).run_once()
    before = _all(database)

    @dataclass
    class Unmounting(Faults):
        def around(self, what: str, call: Callable[[], _T]) -> _T:
            if what == "list gpt/commits/" and not (tmp_path / "away").exists():
                (tmp_path / "store").rename(tmp_path / "away")
                (tmp_path / "store").mkdir()  # the mount point remains
            return super().around(what, call)

    store_sync = _store_sync(FaultyStore(store, Unmounting()), database)
    with pytest.raises(StoreUnavailable, match="while it was listed"):
        store_sync.sync_run("gpt")
    assert _all(database) == before


@on_both
def test_outcomes_are_read_once(store: Store, database: Database) -> None:
    kept = [write_checkpoint(store, step=step, arrays={}) for step in range(5)]
    counting = Faults()
    store_sync = _store_sync(FaultyStore(store, counting), database)
    store_sync.run_once()
    delete_checkpoint(Run(store, kept[0].run), kept[0].attempt, "test")
    counting.calls.clear()
    for _ in range(3):
        store_sync.run_once()
    assert [call for call in counting.calls if call.startswith("get")] == []
    assert len(_all(database, "gpt")) == 4


def test_an_outage_and_its_end_are_said_once(
    store: Store, database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoint(store, arrays={})
    within: list[bool | None] = []  # while a run is read, before queries are answered
    first = Interleaving(1, lambda: within.append(store_sync.answers))
    store_sync = _store_sync(FaultyStore(store, first), database)
    for away in (False, True, True, True, False, False, True):
        if away and (tmp_path / "store").exists():
            (tmp_path / "store").rename(tmp_path / "away")
        elif not away and (tmp_path / "away").exists():
            (tmp_path / "away").rename(tmp_path / "store")
        store_sync.run_once()
        assert store_sync.answers is not away
    said = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert (["answers again" in message for message in said], within) == ([False, True, False], [None])
    assert all(store.url in message or str(tmp_path / "store") in message for message in said)
