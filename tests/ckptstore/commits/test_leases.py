from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from ckptstore.clock import system_clock
from ckptstore.commits.catalog import Checkpoint, list_checkpoints
from ckptstore.commits.hidden import hidden_attempts
from ckptstore.commits.leases import active_leases, end_lease, expired_leases, release_lease, renew_lease, take_lease
from ckptstore.errors import CheckpointHeld, NoCheckpoint
from ckptstore.format.records import Policy
from ckptstore.names import new_ulid
from ckptstore.retention.deletion import TOMBSTONE_KEPT_S, collect, delete_checkpoint
from ckptstore.retention.pins import pin
from ckptstore.retention.pruning import plan_prune
from ckptstore.run import Run
from ckptstore.stores import Store, open_store
from ckptstore.stores.checks import MAX_SKEW_S
from ckptstore.stores.retrying import RetryingStore
from tests.conftest import in_memory
from tests.support.checkpoints import RUN, at_every_call, clear, intact, keys, write
from tests.support.stores import DictStore, FakeClock, Faults, FaultyStore, Interleaving, MovableClock


def test_a_leased_checkpoint_is_spared_until_the_lease_ends(store: Store) -> None:
    old, newest = write(store, 1, 2)
    clock = MovableClock()
    run = Run(store, RUN, clock)
    lease = take_lease(run, old.attempt, "restore of rank 0", 600)
    other = take_lease(run, old.attempt, "restore of rank 1", 60)
    verdicts = plan_prune(run, Policy(1)).decisions
    assert set(verdicts[1].reasons) == {"lease:restore of rank 0", "lease:restore of rank 1"}
    with pytest.raises(CheckpointHeld, match="restore of rank 0"):
        delete_checkpoint(run, old.attempt, "prune", force=True)
    assert not hidden_attempts(run).tombstoned, "a refused deletion does not hide"
    clock.advance(120 + MAX_SKEW_S)
    assert active_leases(run) == {old.attempt: ["restore of rank 0"]}
    assert expired_leases(run) == [f"{RUN}/leases/{other}.json"]
    release_lease(run, lease)
    release_lease(run, lease)
    delete_checkpoint(run, old.attempt, "prune", force=True)
    assert [c.attempt for c in list_checkpoints(run)] == [newest.attempt]
    with pytest.raises(NoCheckpoint, match="being deleted"):
        take_lease(run, old.attempt, "late", 60)
    assert keys(store, run.keys.leases) == [f"{RUN}/leases/{other}.json"], "the refused one is gone"
    collect(run)
    assert keys(store, run.keys.leases) == []


def test_a_lease_is_released_by_one_try(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its store may be gone for good: no process waits for it at its end."""
    folder = tmp_path / "store"
    store = RetryingStore(open_store(str(folder)), 60.0, sleep=lambda _: pytest.fail("it is tried again"))
    run, [checkpoint] = Run(store, RUN), write(store, 1)
    lease = take_lease(run, checkpoint.attempt, "me", 60.0)
    folder.rename(tmp_path / "gone")
    end_lease(run, lease)
    assert "was not released and will expire" in caplog.text
    assert not folder.exists()


def test_damaged_leases_hold_nothing_and_other_names_are_left_alone(store: Store) -> None:
    run = Run(store, RUN)
    old, _ = write(store, 1, 2)
    store.put(f"{RUN}/leases/{new_ulid(system_clock())}.json", b"noise")
    store.put(f"{RUN}/leases/note.json", b"an operator's")
    assert active_leases(run) == {}
    delete_checkpoint(run, old.attempt, "prune", force=True)
    collect(run)
    assert keys(store, run.keys.leases) == [f"{RUN}/leases/note.json"]


@pytest.mark.parametrize("off_s", [-86_400, -1200, 1200, 86_400])
def test_a_lease_counts_by_the_stores_clock_not_the_readers(off_s: float) -> None:
    clock = FakeClock()
    store = DictStore(clock)
    old, _ = write(store, 1, 2)
    run, reader = Run(store, RUN, clock), Run(store, RUN, lambda: clock() + off_s)
    lease = take_lease(reader, old.attempt, "reader", 600)
    for _ in range(2):
        clock.now += 590
        with pytest.raises(CheckpointHeld, match="reader"):
            delete_checkpoint(run, old.attempt, "prune", force=True)
        renew_lease(reader, lease, old.attempt, "reader", 600)
    # A renewed lease may last longer by the time since it was taken.
    clock.now += 600 + 1180 + MAX_SKEW_S
    assert expired_leases(run) == [f"{RUN}/leases/{lease}.json"]
    delete_checkpoint(run, old.attempt, "prune", force=True)


@pytest.mark.parametrize("off_s", [-MAX_SKEW_S, MAX_SKEW_S])
def test_a_lease_lasts_its_duration_under_any_deleter_that_may_delete(off_s: float) -> None:
    clock = FakeClock()
    store = DictStore(clock)
    old, _ = write(store, 1, 2)
    take_lease(Run(store, RUN, clock), old.attempt, "reader", 600)
    deleter = Run(store, RUN, lambda: clock() + off_s)
    clock.now += 599
    with pytest.raises(CheckpointHeld, match="reader"):
        delete_checkpoint(deleter, old.attempt, "prune", force=True)
    clock.now += 1 + 2 * MAX_SKEW_S
    delete_checkpoint(deleter, old.attempt, "prune", force=True)


def read_under_lease(store: Store, checkpoint: Checkpoint, meanwhile: Callable[[], object] = lambda: None) -> bool:
    """Whether the lease was granted; then everything must be readable under it, whatever happens meanwhile."""
    run = Run(store, RUN)
    try:
        lease = take_lease(run, checkpoint.attempt, "reader", 3600)
    except NoCheckpoint:
        return False
    meanwhile()
    assert intact(store, checkpoint), "deleted under a lease"
    release_lease(run, lease)
    return True


def delete(store: Store, checkpoint: Checkpoint) -> None:
    with contextlib.suppress(CheckpointHeld):
        delete_checkpoint(Run(store, RUN), checkpoint.attempt, "prune", force=True)


def one(store: Store) -> Checkpoint:
    return write(store, 1)[0]


@in_memory
def test_a_reader_at_every_moment_of_a_deletion(store: Store) -> None:
    """And a second deleter and a collector act while the reader reads."""
    run, granted = Run(store, RUN), set()

    def others(checkpoint: Checkpoint) -> None:
        delete(store, checkpoint)
        collect(run)

    def read(checkpoint: Checkpoint) -> bool:
        return read_under_lease(store, checkpoint, partial(others, checkpoint))

    for checkpoint, _, (readable,) in at_every_call(store, one, delete, read):
        granted.add(readable)
        collect(run)
        hidden = checkpoint.attempt in hidden_attempts(run)
        assert bool(keys(store, run.keys.attempt(checkpoint.attempt))) == (not hidden)
    assert granted == {True, False}


@in_memory
@pytest.mark.parametrize("who", ["deleter", "deleter and collector"])
def test_a_deletion_at_every_moment_of_a_reader(store: Store, who: str) -> None:
    def act(checkpoint: Checkpoint) -> None:
        delete(store, checkpoint)
        if who != "deleter":
            collect(Run(store, RUN))

    assert {granted for _, granted, _ in at_every_call(store, one, read_under_lease, act)} == {True, False}


@in_memory
def test_a_deletion_is_taken_back_when_a_reader_came_between_its_two_looks(store: Store) -> None:
    """And a pin is as good as a lease."""

    def take(checkpoint: Checkpoint) -> object:
        return take_lease(Run(store, RUN), checkpoint.attempt, "reader", 60)

    def pin_it(checkpoint: Checkpoint) -> None:
        pin(Run(store, RUN, by="me"), checkpoint.attempt, "paper")

    for hold in (take, pin_it):
        (checkpoint,) = write(store, 1)
        calls = Faults()
        delete_checkpoint(Run(FaultyStore(store, calls), RUN), checkpoint.attempt, "count", force=True)
        before_tombstone = next(i for i, call in enumerate(calls.calls) if "put gpt/tombstones" in call)
        clear(store)
        (checkpoint,) = write(store, 2)
        faulty = FaultyStore(store, Interleaving(before_tombstone, partial(hold, checkpoint)))
        with pytest.raises(CheckpointHeld):
            delete_checkpoint(Run(faulty, RUN), checkpoint.attempt, "prune", force=True)
        assert list_checkpoints(Run(store, RUN)) == [checkpoint]
        assert intact(store, checkpoint)
        collect(Run(store, RUN, MovableClock(2 * TOMBSTONE_KEPT_S)))
        assert not hidden_attempts(Run(store, RUN)).tombstoned
        clear(store)
