"""Leases against deletions and collections, at every moment of both."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from ckptstore import names
from ckptstore.clock import system_clock
from ckptstore.commits.catalog import Checkpoint, hidden_attempts, list_checkpoints
from ckptstore.commits.leases import active_leases, expired_leases, release_lease, take_lease
from ckptstore.errors import CheckpointHeld, NoCheckpoint
from ckptstore.names import new_ulid
from ckptstore.retention.deletion import (
    apply_prune,
    collect,
    delete_checkpoint,
    plan_prune,
)
from ckptstore.retention.pins import pin
from ckptstore.retention.policy import Policy
from ckptstore.retention.tombstones import TOMBSTONE_KEPT_S
from ckptstore.stores import Store
from tests.support.runs import RUN, clear, count_calls, intact, keys, write
from tests.support.stores import Faults, FaultyStore, Interleaving, MovableClock, race

in_memory = pytest.mark.parametrize("store", ["memory"], indirect=True)
here_and_in_memory = pytest.mark.parametrize("store", ["local", "memory"], indirect=True)


def test_a_leased_checkpoint_is_spared_until_the_lease_ends(store: Store) -> None:
    old, newest = write(store, 1, 2)
    clock = MovableClock()
    lease = take_lease(store, RUN, old.attempt, "restore of rank 0", 600, clock)
    other = take_lease(store, RUN, old.attempt, "restore of rank 1", 60, clock)
    verdicts = plan_prune(store, RUN, Policy(1), clock).verdicts
    assert set(verdicts[1].reasons) == {"lease:restore of rank 0", "lease:restore of rank 1"}
    with pytest.raises(CheckpointHeld, match="restore of rank 0"):
        delete_checkpoint(store, old, "prune", clock)
    assert hidden_attempts(store, RUN) == [], "a refused deletion does not hide"
    clock.advance(120)
    assert active_leases(store, RUN, clock) == {old.attempt: ["restore of rank 0"]}
    assert expired_leases(store, RUN, clock) == [f"{RUN}/leases/{other}.json"]
    release_lease(store, RUN, lease)
    release_lease(store, RUN, lease)
    delete_checkpoint(store, old, "prune", clock)
    assert [c.attempt for c in list_checkpoints(store, RUN)] == [newest.attempt]
    with pytest.raises(NoCheckpoint, match="being deleted"):
        take_lease(store, RUN, old.attempt, "late", 60, clock)
    assert keys(store, names.leases_prefix(RUN)) == [f"{RUN}/leases/{other}.json"], "the refused one is gone"
    collect(store, RUN, clock)
    assert keys(store, names.leases_prefix(RUN)) == []


def test_a_plan_made_before_the_lease_spares_the_checkpoint(store: Store) -> None:
    old, _ = write(store, 1, 2)
    plan = plan_prune(store, RUN, Policy(1), system_clock)
    take_lease(store, RUN, old.attempt, "reader", 60, system_clock)
    assert apply_prune(store, plan, system_clock) == [old]
    assert intact(store, old)


def test_damaged_leases_hold_nothing_and_stop_nothing(store: Store) -> None:
    old, _ = write(store, 1, 2)
    store.put(f"{RUN}/leases/{new_ulid(system_clock())}.json", b"noise")
    assert active_leases(store, RUN, system_clock) == {}
    delete_checkpoint(store, old, "prune", system_clock)
    collect(store, RUN, system_clock)
    assert keys(store, names.leases_prefix(RUN)) == []


def read_under_lease(store: Store, checkpoint: Checkpoint, meanwhile: Callable[[], object] = lambda: None) -> bool:
    """Whether the lease was granted; then everything must be readable under it, whatever happens meanwhile."""
    try:
        lease = take_lease(store, RUN, checkpoint.attempt, "reader", 3600, system_clock)
    except NoCheckpoint:
        return False
    meanwhile()
    assert intact(store, checkpoint), "deleted under a lease"
    release_lease(store, RUN, lease)
    return True


def delete(store: Store, checkpoint: Checkpoint) -> None:
    try:
        delete_checkpoint(store, checkpoint, "prune", system_clock)
    except CheckpointHeld:
        pass


@in_memory
def test_a_reader_at_every_moment_of_a_deletion(store: Store) -> None:
    """And a second deleter and a collector act while the reader reads."""
    (checkpoint,) = write(store, 1)
    calls = count_calls(store, partial(delete, checkpoint=checkpoint))
    granted = set()
    for k in range(calls):
        clear(store)
        (checkpoint,) = write(store, 1)

        def others(checkpoint: Checkpoint = checkpoint) -> None:
            delete(store, checkpoint)
            collect(store, RUN, system_clock)

        def read(checkpoint: Checkpoint = checkpoint, others: Callable[[], None] = others) -> None:
            granted.add(read_under_lease(store, checkpoint, others))

        delete(FaultyStore(store, Interleaving(k, read)), checkpoint)
        collect(store, RUN, system_clock)
        hidden = checkpoint.attempt in hidden_attempts(store, RUN)
        assert bool(keys(store, names.attempt_prefix(RUN, checkpoint.attempt))) == (not hidden)
    assert granted == {True, False}


@in_memory
@pytest.mark.parametrize("who", ["deleter", "deleter and collector"])
def test_a_deletion_at_every_moment_of_a_reader(store: Store, who: str) -> None:
    (checkpoint,) = write(store, 1)
    calls = count_calls(store, partial(read_under_lease, checkpoint=checkpoint))
    granted = set()
    for k in range(calls):
        clear(store)
        (checkpoint,) = write(store, 1)

        def act(checkpoint: Checkpoint = checkpoint) -> None:
            delete(store, checkpoint)
            if who != "deleter":
                collect(store, RUN, system_clock)

        granted.add(read_under_lease(FaultyStore(store, Interleaving(k, act)), checkpoint))
    assert granted == {True, False}


@in_memory
def test_a_deletion_is_taken_back_when_a_reader_came_between_its_two_looks(store: Store) -> None:
    """And a pin is as good as a lease."""

    def take(checkpoint: Checkpoint) -> object:
        return take_lease(store, RUN, checkpoint.attempt, "reader", 60, system_clock)

    def pin_it(checkpoint: Checkpoint) -> None:
        pin(store, RUN, checkpoint.attempt, "paper", "me", system_clock)

    for hold in (take, pin_it):
        (checkpoint,) = write(store, 1)
        calls = Faults()
        delete_checkpoint(FaultyStore(store, calls), checkpoint, "count", system_clock)
        before_tombstone = next(i for i, call in enumerate(calls.calls) if "put gpt/tombstones" in call)
        clear(store)
        (checkpoint,) = write(store, 2)
        faulty = FaultyStore(store, Interleaving(before_tombstone, partial(hold, checkpoint)))
        with pytest.raises(CheckpointHeld):
            delete_checkpoint(faulty, checkpoint, "prune", system_clock)
        assert list_checkpoints(store, RUN) == [checkpoint]
        assert intact(store, checkpoint)
        collect(store, RUN, MovableClock(2 * TOMBSTONE_KEPT_S))
        assert hidden_attempts(store, RUN) == []
        clear(store)


@here_and_in_memory
def test_readers_and_deleters_in_threads(store: Store) -> None:
    for _ in range(40):
        (checkpoint,) = write(store, 1)
        results = race(
            partial(read_under_lease, store, checkpoint),
            partial(delete, store, checkpoint),
            partial(collect, store, RUN, system_clock),
            partial(delete, store, checkpoint),
        )
        assert not [r for r in results if isinstance(r, BaseException)], results
        clear(store)
