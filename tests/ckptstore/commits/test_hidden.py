"""Processes that sleep for weeks bring nothing back: lists of deleted attempts replace old tombstones and aborted
outcomes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from ckptstore.commits.catalog import find, latest, list_checkpoints
from ckptstore.commits.commit import commit_attempt, decide, read_outcome
from ckptstore.commits.hidden import DeletedAttempts, hidden_attempts, record_deleted
from ckptstore.commits.leases import active_leases, take_lease
from ckptstore.errors import AttemptAborted, CkptError, NoCheckpoint, ReferenceLost, UnsupportedFormat
from ckptstore.format.merging import StoredReceipt
from ckptstore.format.parsing import parse_sealed, seal
from ckptstore.format.records import DeletedList
from ckptstore.names import Attempt, Reference, new_ulid
from ckptstore.retention.deletion import TOMBSTONE_KEPT_S, collect, forget_tombstones, hide, list_hidden, sweep
from ckptstore.retention.pins import pin, pinned
from ckptstore.run import Run
from ckptstore.stores import Store
from tests.ckptstore.format import independent_reader
from tests.conftest import every_store, in_memory
from tests.support.checkpoints import RUN, SMALL, at_every_call, failing_at_every_call, keys, steps, write, write_rank
from tests.support.stores import Faults, FaultyStore, Interleaving, Mode, MovableClock, race

DAY = MovableClock(25 * 3600.0)
WEEKS = MovableClock(2 * TOMBSTONE_KEPT_S)
OUTCOME = f"put_if_absent {RUN}/commits/"

_T = TypeVar("_T")
End = Callable[[Store, list[StoredReceipt]], None]


def complete(store: Store, step: int = 1, generation: int = 0) -> list[StoredReceipt]:
    """An attempt that lacks only its outcome."""
    return [write_rank(store, RUN, Attempt(step, new_ulid(0), generation=generation), SMALL)]


def named(receipts: list[StoredReceipt]) -> Attempt:
    return Attempt.parse(receipts[0].receipt.attempt)


def delete(store: Store, receipts: list[StoredReceipt]) -> None:
    """Another process commits it, if nobody has; it is deleted and swept."""
    try:
        commit_attempt(Run(store, RUN), receipts)
    except AttemptAborted:
        return
    assert hide(Run(store, RUN), [named(receipts)], "test") == {}
    sweep(Run(store, RUN, DAY))


def abort(store: Store, receipts: list[StoredReceipt]) -> None:
    """A rank fails, unless it is committed already."""
    if decide(Run(store, RUN, by="a failing rank"), named(receipts), None).committed is not None:
        delete(store, receipts)
    collect(Run(store, RUN, DAY))


def forget(store: Store) -> None:
    """A collection after weeks."""
    collect(Run(store, RUN, WEEKS))


class Sleeping(Interleaving):
    """Others act before the first call of one kind."""

    def __init__(self, before: str, act: Callable[[], object]) -> None:
        super().__init__(-1, act)
        self._before = before

    def around(self, what: str, call: Callable[[], _T]) -> _T:
        if self.at < 0 and what.startswith(self._before):
            self.at = len(self.calls)
        return super().around(what, call)


def sleeping(store: Store, before: str, act: Callable[[Run], object], others: Callable[[], object]) -> object:
    """The result or the error of a process that sleeps before its first call of this kind, while others act."""
    calls = Sleeping(before, others)
    try:
        return act(Run(FaultyStore(store, calls), RUN))
    except CkptError as error:
        return error
    finally:
        assert calls.at >= 0, f"{before} is not in {calls.calls}"


def is_forgotten(store: Store, deleted: Attempt) -> None:
    run = Run(store, RUN)
    assert deleted in DeletedAttempts(run)
    assert not list_hidden(run)
    assert read_outcome(run, deleted) is None


def nothing_came_back(store: Store, deleted: Attempt) -> None:
    """No reader sees it, and the next collections leave nothing of it."""
    run = Run(store, RUN)
    assert deleted not in [c.attempt for c in list_checkpoints(run)]
    with pytest.raises(NoCheckpoint):
        find(store, Reference(RUN, deleted.step, deleted.ulid))
    assert collect(Run(store, RUN, DAY)).rolled_forward == []
    forget(store)
    assert keys(store, run.keys.attempt(deleted)) == keys(store, run.keys.tombstones) == []
    is_forgotten(store, deleted)


@every_store
@pytest.mark.parametrize("end", [delete, abort])
def test_a_committer_that_wakes_up_after_weeks_brings_nothing_back(store: Store, end: End) -> None:
    receipts = complete(store)

    def others() -> None:
        end(store, receipts)
        forget(store)
        is_forgotten(store, named(receipts))

    result = sleeping(store, OUTCOME, lambda run: commit_attempt(run, receipts), others)
    assert isinstance(result, AttemptAborted)
    assert read_outcome(Run(store, RUN), named(receipts)) is not None, "it created the outcome"
    with pytest.raises(NoCheckpoint):
        latest(Run(store, RUN))
    nothing_came_back(store, named(receipts))


@in_memory
@pytest.mark.parametrize("end", [delete, abort])
def test_nor_does_one_that_slept_at_any_other_call(store: Store, end: End) -> None:
    def is_aborted(on: Store, receipts: list[StoredReceipt]) -> bool:
        try:
            commit_attempt(Run(on, RUN), receipts)
        except AttemptAborted:
            return True
        return False

    def others(receipts: list[StoredReceipt]) -> None:
        end(store, receipts)
        forget(store)

    for receipts, aborted, _ in at_every_call(store, complete, is_aborted, others):
        assert aborted
        nothing_came_back(store, named(receipts))


def is_deleted_and_committed_again(store: Store, receipts: list[StoredReceipt]) -> None:
    """So that a checkpoint seems to be there."""
    delete(store, receipts)
    forget(store)
    with pytest.raises(AttemptAborted):
        commit_attempt(Run(store, RUN), receipts)


@every_store
def test_a_reader_and_an_operator_that_slept_hold_nothing(store: Store) -> None:
    takes = {
        f"put {RUN}/leases/": lambda run, deleted: take_lease(run, deleted, "reader", 3600),
        f"put {RUN}/pins/": lambda run, deleted: pin(run, deleted, "paper"),
    }
    for before, take in takes.items():
        receipts = complete(store)
        deleted = named(receipts)
        commit_attempt(Run(store, RUN), receipts)
        others = partial(is_deleted_and_committed_again, store, receipts)
        assert isinstance(sleeping(store, before, partial(take, deleted=deleted), others), NoCheckpoint)
        assert not active_leases(Run(store, RUN))
        assert not pinned(Run(store, RUN))
        nothing_came_back(store, deleted)


@every_store
def test_a_save_does_not_reference_what_is_deleted(store: Store) -> None:
    receipts = complete(store)
    base = named(receipts)
    commit_attempt(Run(store, RUN), receipts)
    later = Attempt(2, new_ulid(1))
    referencing = [write_rank(store, RUN, later, SMALL | {"model/b": np.ones(9)}, base=base)]
    others = partial(is_deleted_and_committed_again, store, receipts)
    result = sleeping(store, f"put {RUN}/references/", lambda run: commit_attempt(run, referencing), others)
    assert isinstance(result, ReferenceLost)
    assert steps(store) == []
    nothing_came_back(store, base)


def swept_and_aborted(store: Store) -> list[list[StoredReceipt]]:
    """Two attempts that wait to be forgotten, in two generations, beside one that is alive."""
    alive, swept, aborted = complete(store, 3), complete(store, 1), complete(store, 2, generation=1)
    commit_attempt(Run(store, RUN), alive)
    delete(store, swept)
    abort(store, aborted)
    return [swept, aborted]


def wake(store: Store, deleted: list[list[StoredReceipt]]) -> None:
    """Old committers wake up. Nothing that was deleted or aborted is visible."""
    for receipts in deleted:
        try:
            outcome = commit_attempt(Run(store, RUN), receipts)
        except AttemptAborted:
            continue
        # Committed again, but a tombstone is left.
        assert outcome.committed is not None
        assert named(receipts) in hidden_attempts(Run(store, RUN)).tombstoned
    assert (steps(store), latest(Run(store, RUN)).step) == ([3], 3)


@in_memory
@pytest.mark.parametrize("mode", ["before", "after"])
def test_a_crash_at_every_call_of_a_collection_that_forgets(store: Store, mode: Mode) -> None:
    swept_and_aborted(store)
    calls = Faults()
    forget(FaultyStore(store, calls))
    assert sum("/dead/" in call for call in calls.calls) >= 8
    for deleted in failing_at_every_call(store, swept_and_aborted, lambda on, _: forget(on), mode):
        wake(store, deleted)
        for _ in range(2):
            forget(store)
        for receipts in deleted:
            nothing_came_back(store, named(receipts))
        assert steps(store) == [3]


@in_memory
@pytest.mark.parametrize("rounds", [1, 3])
def test_a_second_collector_at_every_call_of_the_first(store: Store, rounds: int) -> None:
    """One round: at the same time. Three: the first one sleeps while others add to the lists and remove versions."""

    def others(deleted: list[list[StoredReceipt]]) -> None:
        for number in range(rounds):
            if number:
                deleted.append(complete(store, 1))
                delete(store, deleted[-1])
            forget(store)

    for deleted, _, _ in at_every_call(store, swept_and_aborted, lambda on, _: forget(on), others):
        wake(store, deleted)
        forget(store)
        for receipts in deleted:
            nothing_came_back(store, named(receipts))
        assert len(keys(store, Run(store, RUN).keys.deleted_lists)) == 2, "the newest version of each generation"


@every_store
def test_a_list_grows_by_versions_of_which_the_newest_stays(store: Store) -> None:
    run = Run(store, RUN)
    attempts = [Attempt(step, new_ulid(0), generation=step % 2) for step in range(6)]
    for first in (0, 2, 4):
        assert record_deleted(run, attempts[first : first + 2]) == set(attempts[first : first + 2])
    assert record_deleted(run, attempts) == set(attempts), "all of them are listed already"
    assert keys(store, run.keys.deleted_lists) == [run.keys.deleted_list(0, 3), run.keys.deleted_list(1, 3)]
    assert all(attempt in DeletedAttempts(run) for attempt in attempts)
    assert Attempt(0, new_ulid(1)) not in DeletedAttempts(run)


def test_of_two_tombstones_one_may_be_forgotten(store: Store) -> None:
    """The attempt is deleted and hidden, until the other one is forgotten as well."""
    run, later = Run(store, RUN), Run(store, RUN, WEEKS)
    (checkpoint,) = write(store, 1)
    hide(run, [checkpoint.attempt], "one")
    sweep(Run(store, RUN, DAY))
    hide(run, [checkpoint.attempt], "two")
    forget_tombstones(later)
    assert checkpoint.attempt in hidden_attempts(run).tombstoned
    assert checkpoint.attempt in DeletedAttempts(run)
    forget(store)
    collect(Run(store, RUN, MovableClock(4 * TOMBSTONE_KEPT_S)))
    assert not list_hidden(run)


def test_a_damaged_list_counts_as_empty_and_forgets_nothing(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(store, RUN)
    write(store, 2)
    record_deleted(run, [Attempt(9, new_ulid(0))])
    store.put(run.keys.deleted_list(0, 1), b"noise")
    receipts = complete(store)
    delete(store, receipts)
    with caplog.at_level(logging.WARNING):
        forget(store)
        assert latest(run).step == 2
    assert "dead/000000.00000001.json" in caplog.text
    assert [hidden.attempt for hidden in list_hidden(run)] == [named(receipts)]
    assert keys(store, run.keys.deleted_lists) == [run.keys.deleted_list(0, 1)]


def test_a_list_of_a_newer_format_is_an_error(store: Store) -> None:
    run = Run(store, RUN)
    write(store, 1)
    list_ = DeletedList(format=3, kind="dead", generation=0, version=1, attempts=[], by="me", at=0.0)
    store.put(run.keys.deleted_list(0, 1), seal(list_))
    with pytest.raises(UnsupportedFormat):
        latest(run)


def test_latest_reads_the_list_of_the_head_only(store: Store) -> None:
    run, calls = Run(store, RUN), Faults()
    write(store, 1)
    latest(Run(FaultyStore(store, calls), RUN))
    assert len([call for call in calls.calls if "/dead/" in call]) == 1, "one listing while nothing is forgotten"
    record_deleted(run, [Attempt(1, new_ulid(0), generation=number) for number in range(3)])
    calls.calls.clear()
    latest(Run(FaultyStore(store, calls), RUN))
    assert [call for call in calls.calls if "/dead/" in call] == [
        f"list {run.keys.deleted_lists}", f"get {run.keys.deleted_list(0, 1)}"
    ]  # fmt: skip


def test_a_reader_written_from_the_documentation_sees_the_same(store: Store, tmp_path: Path) -> None:
    deleted = complete(store, 9)
    write(store, 1)
    delete(store, deleted)
    forget(store)
    with pytest.raises(AttemptAborted):
        commit_attempt(Run(store, RUN), deleted)
    assert read_outcome(Run(store, RUN), named(deleted)) is not None
    assert independent_reader.latest(str(tmp_path / "store"), RUN)["step"] == latest(Run(store, RUN)).step == 1


A = str(Attempt(1, new_ulid(0), generation=2))
B = str(Attempt(2, new_ulid(0), generation=2))


@pytest.mark.parametrize(
    "change",
    [{"attempts": [B, A]}, {"attempts": [A, A]}, {"attempts": ["../x"]}, {"generation": 3}, {"version": 0},
     {"generation": -1}, {"version": 10**9}],
)  # fmt: skip
def test_a_list_is_checked(change: dict[str, object]) -> None:
    fields = {"format": 2, "kind": "dead", "generation": 2, "version": 1, "attempts": [A, B], "by": "me", "at": 0.0}
    parse_sealed(seal(DeletedList(**fields)), DeletedList, "k")  # type: ignore[arg-type]
    with pytest.raises(CkptError, match=r"^k"):
        parse_sealed(seal(DeletedList(**fields | change)), DeletedList, "k")  # type: ignore[arg-type]


@in_memory
def test_collectors_at_once_list_everything(store: Store) -> None:
    run, attempts = Run(store, RUN), [Attempt(step, new_ulid(0)) for step in range(12)]
    results = race(*(partial(record_deleted, run, attempts[n::4]) for n in range(4)))
    assert results == [set(attempts[n::4]) for n in range(4)]
    assert all(attempt in DeletedAttempts(run) for attempt in attempts)
