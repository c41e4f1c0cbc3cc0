"""Undelete against sweep: at every moment of each other, in threads, with crashes at every call, and with SIGKILL."""

from __future__ import annotations

import contextlib
import itertools
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from ckptstore.commits.audit import read_log
from ckptstore.commits.catalog import Checkpoint, list_checkpoints
from ckptstore.commits.leases import release_lease, take_lease
from ckptstore.errors import CheckpointHeld, CorruptObject, NoCheckpoint, StoreUnavailable, SweepBegun
from ckptstore.format.records import Policy
from ckptstore.names import Reference, RunKeys, new_ulid
from ckptstore.retention.deletion import (
    SWEEP_GRACE_S,
    TOMBSTONE_KEPT_S,
    collect,
    delete_checkpoint,
    forget_tombstones,
    hide,
    list_deleted,
    list_hidden,
    measure_waste,
    sweep,
    undelete,
    undelete_checkpoint,
)
from ckptstore.retention.pins import pinned
from ckptstore.retention.pruning import apply_prune, plan_prune
from ckptstore.run import Run
from ckptstore.stores import Store
from tests.conftest import here_and_in_memory, in_memory
from tests.support.checkpoints import (
    RUN,
    at_every_call,
    clear,
    count_calls,
    failing_at_every_call,
    intact,
    keys,
    prune_undelete_and_collect,
    steps,
    write,
)
from tests.support.forking import fork
from tests.support.stores import Faults, FaultyStore, Mode, MovableClock, race

on_a_folder = pytest.mark.parametrize("store", ["local"], indirect=True)
LATER = MovableClock(SWEEP_GRACE_S + 60)


def hidden_checkpoint(store: Store) -> Checkpoint:
    (checkpoint,) = write(store, 1)
    assert (hide(Run(store, RUN, by="me"), [checkpoint.attempt], "test"), steps(store)) == ({}, [])
    return checkpoint


def try_to_undelete(store: Store, checkpoint: Checkpoint) -> bool:
    try:
        undelete(Run(store, RUN, by="me"), checkpoint.attempt)
    except (SweepBegun, NoCheckpoint):
        return False
    return True


def sweep_all(store: Store) -> object:
    return sweep(Run(store, RUN, LATER, "sweeper"))


def forget(store: Store, weeks: int) -> None:
    """Old tombstones and sweep decisions are forgotten, as that many weeks pass for the other process."""
    forget_tombstones(Run(store, RUN, MovableClock(weeks * TOMBSTONE_KEPT_S)))


def sweep_and_forget(store: Store, weeks: int, _: object) -> None:
    sweep_all(store)
    forget(store, weeks)


def exactly_one_won(store: Store, checkpoint: Checkpoint, undeleted: bool) -> None:
    """Back and whole, or gone without a byte."""
    run = Run(store, RUN)
    sweep_all(store)
    assert list_checkpoints(run) == ([checkpoint] if undeleted else [])
    if undeleted:
        assert intact(store, checkpoint)
    else:
        assert keys(store, run.keys.attempts) == keys(store, run.keys.commits) == []


def test_a_deletion_can_be_taken_back_and_done_again(store: Store) -> None:
    run, checkpoint = Run(store, RUN, by="me"), hidden_checkpoint(store)
    for _ in range(3):
        undelete(run, checkpoint.attempt, "a mistake")
        assert list_checkpoints(run) == [checkpoint]
        assert sweep_all(store) is not None
        assert intact(store, checkpoint)
        delete_checkpoint(run, checkpoint.attempt, "again", SWEEP_GRACE_S, force=True)
        assert [(body.id, body.reason, body.by) for body in list_deleted(run)] == [(checkpoint.id, "again", "me")]
    assert sweep(run).attempts == (), "the grace is not over"
    assert sweep(replace(run, clock=LATER)).attempts == (checkpoint.attempt,)
    with pytest.raises(SweepBegun):
        undelete(run, checkpoint.attempt)
    assert list_deleted(run) == []
    actions = [record.action for record in read_log(run)]
    assert sorted(actions) == ["delete"] * 4 + ["sweep"] + ["undelete"] * 4


def test_what_was_never_deleted_cannot_be_taken_back(store: Store) -> None:
    (checkpoint,) = write(store, 1)
    with pytest.raises(NoCheckpoint, match="not being deleted"):
        undelete(Run(store, RUN, by="me"), checkpoint.attempt)


@pytest.mark.parametrize("weeks", [0, 2])
@in_memory
def test_an_undelete_at_every_moment_of_a_sweep(store: Store, weeks: int) -> None:
    def act(checkpoint: Checkpoint) -> bool:
        won = try_to_undelete(store, checkpoint)
        forget(store, weeks)
        return won

    results = set()
    for checkpoint, _, (won,) in at_every_call(store, hidden_checkpoint, lambda on, _: sweep_all(on), act):
        exactly_one_won(store, checkpoint, won)
        results.add(won)
    assert results == {True, False}


@pytest.mark.parametrize("weeks", [0, 2])
@in_memory
def test_a_sweep_at_every_moment_of_an_undelete(store: Store, weeks: int) -> None:
    results = set()
    others = partial(sweep_and_forget, store, weeks)
    for checkpoint, won, _ in at_every_call(store, hidden_checkpoint, try_to_undelete, others):
        exactly_one_won(store, checkpoint, won)
        results.add(won)
    assert results == {True, False}


@in_memory
def test_an_undelete_with_a_pin_at_every_moment_of_another_or_of_a_sweep(store: Store) -> None:
    """The pin stays if the checkpoint is listed, and only then."""

    def pin_and_undelete(on: Store, _: object) -> None:
        with contextlib.suppress(NoCheckpoint, SweepBegun):
            undelete_checkpoint(Run(on, RUN), Reference(RUN, 1))

    for others in (partial(sweep_and_forget, store, 2), partial(pin_and_undelete, store)):
        for checkpoint, _, _ in at_every_call(store, hidden_checkpoint, pin_and_undelete, others):
            listed = checkpoint in list_checkpoints(Run(store, RUN))
            assert pinned(Run(store, RUN)) == ({checkpoint.attempt: ["undeleted"]} if listed else {})


@in_memory
def test_an_old_undelete_does_not_undo_the_next_deletion(store: Store) -> None:
    """It stalls before it removes the tombstone; meanwhile others take it back, delete again, and sweep."""
    run = Run(store, RUN, by="me")

    def act(checkpoint: Checkpoint) -> None:
        try_to_undelete(store, checkpoint)
        hide(run, [checkpoint.attempt], "again")
        sweep_all(store)

    for checkpoint, _, _ in at_every_call(store, hidden_checkpoint, try_to_undelete, act):
        assert list_checkpoints(run) == []
        exactly_one_won(store, checkpoint, False)


@here_and_in_memory
def test_undeletes_sweeps_deleters_and_readers_in_threads(store: Store) -> None:
    run = Run(store, RUN)
    for _ in range(25):
        checkpoint = hidden_checkpoint(store)

        def read(checkpoint: Checkpoint = checkpoint) -> None:
            try:
                lease = take_lease(run, checkpoint.attempt, "reader", 10 * SWEEP_GRACE_S)
            except NoCheckpoint:
                return
            assert intact(store, checkpoint), "deleted under a lease"
            release_lease(run, lease)

        def delete(checkpoint: Checkpoint = checkpoint) -> None:
            with contextlib.suppress(CheckpointHeld):
                delete_checkpoint(run, checkpoint.attempt, "again", SWEEP_GRACE_S, force=True)

        results = race(
            partial(try_to_undelete, store, checkpoint), partial(sweep_all, store), read, delete,
            partial(try_to_undelete, store, checkpoint), partial(sweep_all, store), read,
        )  # fmt: skip
        assert not [r for r in results if isinstance(r, BaseException)], results
        for found in list_checkpoints(run):
            assert intact(store, found)
        sweep_all(store)
        left = [found.attempt for found in list_checkpoints(run)]
        assert bool(keys(store, run.keys.attempts)) == bool(left)
        clear(store)


def _scene(store: Store) -> tuple[Checkpoint, ...]:
    """Three hidden, one of which is half swept and one half taken back; one to be pruned; the newest."""
    written = write(store, 1, 2, 3, 4, 5)
    hide(Run(store, RUN, by="me"), [c.attempt for c in written[:3]], "test")
    for action, fail_at in ((lambda s: sweep(Run(s, RUN, by="me"), [written[0].attempt]), 8),
                            (lambda s: try_to_undelete(s, written[1]), 3)):  # fmt: skip
        with contextlib.suppress(StoreUnavailable):
            action(FaultyStore(store, Faults(fail_at)))
    return tuple(written)


@in_memory
@pytest.mark.parametrize("mode", ["before", "after"])
def test_a_crash_at_every_call_of_prune_undelete_and_sweep(store: Store, mode: Mode) -> None:
    def clean(on: Store, written: tuple[Checkpoint, ...]) -> None:
        prune_undelete_and_collect(on, written[2].attempt)

    for calls, written in enumerate(failing_at_every_call(store, _scene, clean, mode, more_than=40)):
        _is_legal_and_can_be_finished(store, written, f"call {calls}")


@on_a_folder
@pytest.mark.parametrize("mode", ["before", "after"])
def test_sigkill_at_every_call_of_prune_undelete_and_sweep(store: Store, mode: str) -> None:
    imports, module = ("tests.support.checkpoints",), "tests.ckptstore.retention.killed_prune"
    for k in itertools.count():
        written = _scene(store)
        process = fork(imports, module, [store.url, str(k), mode, str(written[2].attempt)], stdout=1, stderr=2)
        if (ended := process.wait(60)) == 0:
            break
        assert ended == -signal.SIGKILL
        _is_legal_and_can_be_finished(store, written, f"SIGKILL at call {k}")
        clear(store)
    assert k > 40


def _is_legal_and_can_be_finished(store: Store, written: tuple[Checkpoint, ...], cause: str) -> None:
    listed = list_checkpoints(Run(store, RUN))
    assert listed[0] == written[-1], "the newest is never touched"
    for checkpoint in listed:
        assert intact(store, checkpoint), f"{cause} left {checkpoint.id} listed and broken"
    for waiting in list_deleted(Run(store, RUN)):
        (hidden,) = (c for c in written if c.id == waiting.id)
        assert intact(store, hidden), f"{cause} broke {hidden.id}, which can be taken back"
    end = MovableClock(3 * SWEEP_GRACE_S)
    for _ in range(2):  # the first finishes an undelete that crashed
        collect(Run(store, RUN, end))
        apply_prune(Run(store, RUN, end), plan_prune(Run(store, RUN, end), Policy(1)))
    assert steps(store) == [5]
    assert list(store.list_folders(RunKeys(RUN).attempts)) == [str(written[-1].attempt)]


def test_complete_deletions_are_not_read_again(store: Store) -> None:
    written = write(store, 1, 2, 3, 4)
    assert hide(Run(store, RUN), [checkpoint.attempt for checkpoint in written[:3]], "test") == {}
    sweep_all(store)
    faults = Faults()
    sweep_all(FaultyStore(store, faults))
    assert [call.split()[0] for call in faults.calls] == ["list", "list", "list", "list_folders"]
    assert count_calls(store, lambda s: measure_waste(Run(s, RUN))) == 4


def test_a_week_later_an_undelete_that_died_is_finished(store: Store) -> None:
    checkpoint, faults = hidden_checkpoint(store), Faults()
    undelete(Run(FaultyStore(store, faults), RUN), checkpoint.attempt)
    hide(Run(store, RUN), [checkpoint.attempt], "test")
    with pytest.raises(StoreUnavailable):
        undelete(Run(FaultyStore(store, Faults(len(faults.calls) - 1)), RUN), checkpoint.attempt)
    assert steps(store) == []
    forget(store, weeks=2)
    assert steps(store) == [1]
    assert intact(store, checkpoint)


def test_a_second_tombstone_with_a_long_grace_brings_nothing_back(store: Store) -> None:
    """Two deleters hid it. One tombstone was swept and is forgotten, the other one is still in its grace."""
    run = Run(store, RUN, MovableClock(2 * TOMBSTONE_KEPT_S))
    checkpoint = hidden_checkpoint(store)
    hide(Run(store, RUN), [checkpoint.attempt], "test", grace_s=8 * TOMBSTONE_KEPT_S)
    assert collect(replace(run, clock=LATER)).swept == [checkpoint.id]
    collect(run)
    assert len(list_hidden(run)) == 1
    with pytest.raises(SweepBegun):
        undelete_checkpoint(run, Reference(RUN, 1))
    assert pinned(run) == {}


def test_a_damaged_sweep_decision_deletes_nothing_and_is_reported(store: Store) -> None:
    run, checkpoint = Run(store, RUN), hidden_checkpoint(store)
    (hidden,) = list_hidden(run)
    store.put(run.keys.sweep_decision(checkpoint.attempt, hidden.id), b"noise")
    actions: list[Callable[[Store], object]] = [sweep_all, lambda s: undelete(Run(s, RUN), checkpoint.attempt)]
    for call in actions:
        with pytest.raises(CorruptObject):
            call(store)
    assert intact(store, checkpoint)


def test_a_damaged_tombstone_hides_and_waits_for_the_usual_grace(store: Store) -> None:
    (checkpoint,) = write(store, 1)
    store.put(RunKeys(RUN).tombstone(checkpoint.attempt, new_ulid(0)), b"noise")
    assert steps(store) == []
    assert sweep(Run(store, RUN, MovableClock(SWEEP_GRACE_S - 60), "me")).attempts == ()
    assert sweep_all(store) is not None
    assert keys(store, RunKeys(RUN).attempts) == []
