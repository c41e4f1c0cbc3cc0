from __future__ import annotations

import threading
from collections import Counter

import pytest

from ckptstore.clock import system_clock
from ckptstore.commits.catalog import Checkpoint, decided_attempts, latest, list_checkpoints
from ckptstore.commits.hidden import hidden_attempts
from ckptstore.commits.leases import renew_lease, take_lease
from ckptstore.errors import CheckpointHeld, StoreUnavailable
from ckptstore.format.records import Policy
from ckptstore.names import Attempt, Reference, RunKeys, new_ulid
from ckptstore.operator import StoreOperator
from ckptstore.reading.verify import Verification
from ckptstore.retention.deletion import (
    ORPHAN_GRACE_S,
    TOMBSTONE_KEPT_S,
    collect,
    delete_checkpoint,
    hide,
    list_deleted,
    sweep,
    undecided_attempts,
    undelete_checkpoint,
)
from ckptstore.retention.pruning import apply_prune, plan_prune
from ckptstore.retention.scrubbing import record_finding
from ckptstore.run import Run
from ckptstore.stores import Store
from ckptstore.stores.base import WrappedStore
from ckptstore.tiers.replication import trim
from tests.conftest import in_memory
from tests.support.checkpoints import (
    RUN,
    SMALL,
    failing_at_every_call,
    intact,
    keys,
    prune,
    steps,
    write,
    write_checkpoint,
    write_rank,
)
from tests.support.stores import DictStore, FakeClock, Faults, FaultyStore, Mode, MovableClock

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S


# Deletions of single checkpoints.


def test_the_newest_checkpoint_is_deleted_only_if_that_is_forced(store: Store) -> None:
    run = Run(store, RUN)
    oldest, middle, newest = write(store, 1, 2, 3)
    listed = keys(store)
    for grace_s in (0.0, 3600.0):
        with pytest.raises(CheckpointHeld, match=f"{newest.id} is the newest checkpoint of run"):
            delete_checkpoint(run, newest.attempt, "test", grace_s)
    with pytest.raises(CheckpointHeld):
        StoreOperator(store).delete(newest, 0.0)
    assert keys(store) == listed
    StoreOperator(store).delete(middle, 0.0)
    StoreOperator(store).delete(newest, 0.0, force=True)
    assert steps(store) == [1]
    with pytest.raises(CheckpointHeld):
        delete_checkpoint(run, oldest.attempt, "test")


def test_a_damaged_checkpoint_is_not_the_newest(store: Store) -> None:
    """Restores use the one before it, which is kept instead."""
    run = Run(store, RUN)
    usable, damaged = write(store, 1, 2)
    record_finding(run, Verification(damaged, num_chunks=1, stored_bytes=1, problems=("a byte flipped",)))
    with pytest.raises(CheckpointHeld):
        delete_checkpoint(run, usable.attempt, "test")
    delete_checkpoint(run, damaged.attempt, "test")
    assert steps(store) == [1]


@pytest.mark.parametrize("how", ["delete", "prune", "trim"])
def test_no_grace_is_shorter_than_what_hosts_may_not_see(store: Store, how: str) -> None:
    """On NFS a lease and a tombstone of two hosts may miss each other for a minute."""
    clock = MovableClock()
    run, (old, read, newest) = Run(store, RUN, clock), write(store, 1, 2, 3)
    store.listing_lag_s = 120.0

    if how == "delete":
        for one in (old, read):
            delete_checkpoint(run, one.attempt, "test", 0.0)
    elif how == "prune":
        apply_prune(run, plan_prune(run, Policy(keep_last=1)), grace_s=0.0)
    else:
        trim(run, 1, {})
    assert steps(store) == [3]
    renew_lease(run, new_ulid(clock()), read.attempt, "another host, which saw no tombstone", HOUR_S)
    for wait_s in (60, 100):
        assert all(intact(store, one) for one in (old, read))
        clock.advance(wait_s)
        if how == "trim":
            trim(run, 1, {})
        else:
            sweep(run, only=[])
    assert not keys(store, run.keys.attempt(old.attempt))
    assert all(intact(store, one) for one in (read, newest))


# Orphans.


def orphan(store: Store, step: int, ranks: tuple[int, ...] = (0,), world: int = 2) -> Attempt:
    attempt = Attempt(step, new_ulid(system_clock()))
    for rank in ranks:
        write_rank(store, RUN, attempt, SMALL if rank == 0 else {}, rank, world)
    return attempt


def test_orphans_are_collected_after_the_grace_only(store: Store) -> None:
    (good,) = write(store, 1)
    attempt = orphan(store, 2)
    size = sum(info.bytes for info in store.list(RunKeys(RUN).attempt(attempt)))
    clock = MovableClock(ORPHAN_GRACE_S - 60)
    assert (collect(Run(store, RUN, clock)).aborted, undecided_attempts(Run(store, RUN))) == ([], [attempt])
    clock.advance(120)
    collected = collect(Run(store, RUN, clock))
    assert (collected.aborted, collected.rolled_forward, collected.freed_bytes) == (
        [Run(store, RUN).id_of(attempt)], [], size,
    )  # fmt: skip
    assert (undecided_attempts(Run(store, RUN)), keys(store, RunKeys(RUN).attempt(attempt))) == ([], [])
    assert steps(store) == [1]
    assert intact(store, good)


def test_an_attempt_that_still_grows_is_no_orphan(store: Store) -> None:
    attempt, clock = orphan(store, 2), MovableClock(ORPHAN_GRACE_S - 60)
    run = Run(store, RUN, clock)
    write_rank(store, RUN, attempt, {}, 1, 3)
    assert collect(run).aborted == []
    with store.open_writer(run.keys.shard(Attempt(9, new_ulid(system_clock())), "shard-00000.ckpt")) as writer:
        assert collect(Run(store, RUN)).aborted == [], "its first shard has only begun"
        writer.write(b"x")


def test_what_comes_late_to_an_aborted_attempt_is_collected_too(store: Store) -> None:
    attempt, clock = orphan(store, 2), MovableClock(ORPHAN_GRACE_S + 60)
    run = Run(store, RUN, clock)
    collect(run)
    write_rank(store, RUN, attempt, {}, 0, 2)
    write_rank(store, RUN, attempt, {}, 1, 2)
    assert steps(store) == [], "complete now, and still aborted"
    assert (collect(run).aborted, keys(store, run.keys.attempts)) == ([run.id_of(attempt)], [])
    assert steps(store) == []


def test_aborted_outcomes_and_tombstones_are_forgotten_in_the_end(store: Store) -> None:
    write(store, 1, 2)
    prune(store, 1)
    aborted, clock = orphan(store, 3), MovableClock(ORPHAN_GRACE_S + 60)
    run = Run(store, RUN, clock)
    collect(run)
    assert len(hidden_attempts(run).tombstoned) == 1
    assert aborted in decided_attempts(run)
    clock.ahead_s = TOMBSTONE_KEPT_S - 60
    collect(run)
    assert len(hidden_attempts(run).tombstoned) == 1
    assert aborted in decided_attempts(run)
    clock.advance(120)
    collect(run)
    assert not hidden_attempts(run).tombstoned
    assert (decided_attempts(run), steps(store)) == ([latest(run).attempt], [2])
    assert intact(store, latest(run))


def test_half_a_deletion_is_finished(store: Store) -> None:
    def delete_old(on: Store, written: list[Checkpoint]) -> None:
        delete_checkpoint(Run(on, RUN), written[0].attempt, "prune", force=True)

    for old, _ in failing_at_every_call(store, lambda on: write(on, 1, 2), delete_old, more_than=5):
        hidden = old.attempt in hidden_attempts(Run(store, RUN))
        assert steps(store) == ([2] if hidden else [2, 1]), "gone from the listing at once, or not at all"
        clock = MovableClock(1.0)  # file systems round up what a deletion without grace compares
        collect(Run(store, RUN, clock))
        assert bool(keys(store, RunKeys(RUN).attempt(old.attempt))) == (not hidden)
        assert intact(store, latest(Run(store, RUN)))


def test_an_outcome_goes_before_receipts_and_receipts_before_shards(store: Store) -> None:
    """So that no half of a deletion looks like an attempt that only lacks its commit."""
    (checkpoint,) = write(store, 1)
    faults = Faults()
    delete_checkpoint(Run(FaultyStore(store, faults), RUN), checkpoint.attempt, "prune", force=True)
    deleted = [call.rsplit("/", 1)[-1] for call in faults.calls if call.startswith("delete ")]
    assert deleted[-4:] == [f"{checkpoint.attempt}.json", "shard-00000.json", "manifest.json.zst", "shard-00000.ckpt"]


# Every call of a prune and a collection fails once.


def _everything(store: Store) -> tuple[Checkpoint, Attempt, MovableClock]:
    """One of each kind: superseded, old, newest, orphan, finished attempt, half deletion, expired lease."""
    _, _, to_delete, newest = write(store, 1, 1, 2, 4)
    finished = orphan(store, 3, (0, 1))
    orphan(store, 5)
    with pytest.raises(StoreUnavailable):  # dies after its tombstone
        delete_checkpoint(Run(FaultyStore(store, Faults(3)), RUN), to_delete.attempt, "prune", force=True)
    take_lease(Run(store, RUN), newest.attempt, "reader", 1.0)
    return newest, finished, MovableClock(ORPHAN_GRACE_S + 60)


def _clean(store: Store, clock: MovableClock) -> None:
    run = Run(store, RUN, clock)
    apply_prune(run, plan_prune(run, Policy(1)))
    collect(run)


@in_memory
@pytest.mark.parametrize("mode", ["before", "after"])
def test_cleaning_that_fails_at_any_call(store: Store, mode: Mode) -> None:
    run = Run(store, RUN)
    scenes = failing_at_every_call(store, _everything, lambda on, scene: _clean(on, scene[2]), mode, more_than=50)
    for calls, (newest, finished, clock) in enumerate(scenes):
        for checkpoint in list_checkpoints(run):
            assert intact(store, checkpoint), f"call {calls} left {checkpoint.id} listed and broken"
        assert latest(run) == newest
        _clean(store, clock)
        _clean(store, clock)
        assert steps(store) == [4]
        left = {Attempt.parse(name) for name in store.list_folders(run.keys.attempts)}
        assert left == {newest.attempt}
        assert finished not in left
        assert keys(store, run.keys.leases) == []


def test_a_damaged_outcome_is_not_collected(store: Store) -> None:
    (checkpoint,) = write(store, 1)
    store.put(RunKeys(RUN).outcome(checkpoint.attempt), b"noise")
    clock = MovableClock(2 * TOMBSTONE_KEPT_S)
    assert collect(Run(store, RUN, clock)).aborted == []
    assert keys(store, RunKeys(RUN).attempt(checkpoint.attempt)), "what cannot be read may be worth repairing"


def test_a_reference_means_the_deletion_that_can_be_undone(store: Store) -> None:
    """Step 7 was saved in two generations, and the newer save is swept."""
    run = Run(store, RUN)
    older, newer = (write_checkpoint(store, RUN, 7, SMALL, generation=number) for number in (1, 2))
    assert hide(run, [older.attempt, newer.attempt], "test") == {}
    sweep(run, only=[newer.attempt])
    store.put(run.keys.sweep_decisions + "note.txt", b"an operator's note")
    assert [one.id for one in list_deleted(run)] == [older.id]
    assert undelete_checkpoint(run, Reference(RUN, 7)).ulid == older.attempt.ulid


class _Meeting(WrappedStore):
    """Each read of an outcome waits until another one is under way."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.read: Counter[str] = Counter()
        self._two = threading.Barrier(2)

    def get(self, key: str) -> bytes:
        if "/commits/" in key:
            self.read[key] += 1
            self._two.wait(30)
        return super().get(key)


def test_outcomes_of_checkpoints_that_stay_are_read_once_and_in_parallel() -> None:
    clock = FakeClock()
    store = DictStore(clock)
    write(store, *range(8))
    clock.now += 2 * TOMBSTONE_KEPT_S
    meeting = _Meeting(store)
    done = collect(Run(meeting, RUN, clock))
    assert (done.swept, done.aborted, done.rolled_forward) == ([], [], [])
    assert (sorted(meeting.read.values()), len(steps(store))) == ([1] * 8, 8)
