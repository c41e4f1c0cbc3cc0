"""The commit protocol: one decision per attempt, with any participants, failures and order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import permutations
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ckptstore.clock import system_clock
from ckptstore.commits.catalog import State, latest, list_checkpoints
from ckptstore.commits.commit import (
    commit_attempt,
    decide,
    read_outcome,
    read_receipt,
    read_receipts,
    receipt_ranks,
    roll_forward,
)
from ckptstore.errors import AttemptAborted, CorruptObject, ObjectMissing, StoreUnavailable
from ckptstore.format.documents import Outcome
from ckptstore.format.merging import StoredReceipt, merge
from ckptstore.format.parsing import pack_manifest
from ckptstore.names import Attempt, new_ulid
from ckptstore.reading.source import StoreSource
from ckptstore.reading.verify import verify
from ckptstore.retention.deletion import advance, collect, delete_checkpoint, undecided_attempts
from ckptstore.run import Run
from ckptstore.stores import Store
from ckptstore.stores.retrying import RetryingStore
from tests.conftest import here_and_in_memory, in_memory
from tests.support.checkpoints import (
    RUN,
    at_every_call,
    clear,
    count_calls,
    sample_arrays,
    write_checkpoint,
    write_rank,
)
from tests.support.stores import Faults, FaultyStore, Mode, MovableClock, race
from tests.support.waiting import present

SMALL: dict[str, npt.NDArray[Any]] = {"model/a": np.arange(3000, dtype=np.float32), "model/b": np.arange(5)}


def new_attempt(step: int = 5) -> Attempt:
    return Attempt(step, new_ulid(system_clock()))


def write_ranks(store: Store, attempt: Attempt, world: int = 2) -> list[StoredReceipt]:
    return [
        write_rank(store, RUN, attempt, {f"r{rank}/{name}": a for name, a in SMALL.items()}, rank, world)
        for rank in range(world)
    ]


def assert_legal(store: Store) -> None:
    """The invariant: whatever is listed is whole; the newest is always there."""
    run = Run(store, RUN)
    listed = list_checkpoints(run)
    for checkpoint in listed:
        assert checkpoint.state is not State.CORRUPT
        report = verify(StoreSource(store), checkpoint, threads=1)
        assert report.ok, report.problems
    assert latest(run) in listed


# One committer.


def test_nothing_exists_before_the_outcome(store: Store) -> None:
    run, attempt = Run(store, RUN), new_attempt()
    receipts = write_ranks(store, attempt)
    assert (list_checkpoints(run), undecided_attempts(run)) == ([], [attempt])
    outcome = commit_attempt(run, receipts)
    assert ([c.attempt for c in list_checkpoints(run)], undecided_attempts(run)) == ([attempt], [])
    assert read_outcome(run, attempt) == outcome
    assert_legal(store)


def test_roll_forward_gives_the_manifest_the_committer_would_have_given(store: Store) -> None:
    run, attempt = Run(store, RUN), new_attempt()
    receipts, rolled = write_ranks(store, attempt), present(roll_forward(run, attempt))
    assert store.get(run.keys.manifest(attempt)) == pack_manifest(merge(receipts))
    assert commit_attempt(run, receipts) == rolled


def test_a_receipt_of_an_impossible_world_is_not_committed(store: Store) -> None:
    run = Run(store, RUN)
    hostile, good = new_attempt(step=2), new_attempt(step=3)
    write_rank(store, RUN, hostile, SMALL, 0, world_size=2**40)
    write_ranks(store, good)
    assert not advance(run, hostile)
    assert advance(run, good)
    assert read_outcome(run, hostile) is None


def test_roll_forward_waits_for_every_rank(store: Store) -> None:
    run, attempt = Run(store, RUN), new_attempt()
    assert roll_forward(run, attempt) is None
    write_rank(store, RUN, attempt, SMALL, 1, 3)
    write_rank(store, RUN, attempt, {}, 2, 3)
    assert receipt_ranks(run, attempt) == {1, 2}
    assert roll_forward(run, attempt) is None
    write_rank(store, RUN, attempt, {}, 0, 3)
    assert roll_forward(run, attempt) is not None
    assert_legal(store)


def test_receipts_of_many_ranks_are_listed_by_the_thousand(store: Store) -> None:
    run, attempt = Run(store, RUN), new_attempt()
    for rank in (7, 999, 1000, 1001, 12_345):
        store.put(run.keys.receipt(attempt, rank), b"")
        store.put(run.keys.statistics(attempt, rank), b"")
    assert receipt_ranks(run, attempt) == {7, 999, 1000, 1001, 12_345}
    assert receipt_ranks(run, attempt, {1000, 1500}) == {1000, 1001}
    assert receipt_ranks(run, attempt, {8, 12_345}) == {7, 999, 12_345}
    assert receipt_ranks(run, attempt, {20_000}) == set()


def test_many_receipts_are_read_in_the_order_of_their_ranks(store: Store) -> None:
    run, attempt = Run(store, RUN), new_attempt()
    written = [write_rank(store, RUN, attempt, {}, rank, 9) for rank in range(9)]
    ranks = [8, 3, 0, 1, 2, 7, 6]
    assert [one.ref for one in read_receipts(run, attempt, ranks)] == [written[rank].ref for rank in ranks]
    with pytest.raises(ObjectMissing):
        read_receipts(run, attempt, range(10))


def test_receipts_that_do_not_belong_together(store: Store) -> None:
    run = Run(store, RUN)
    one, other = write_ranks(store, new_attempt()), write_ranks(store, new_attempt())
    for mixture in ([one[0], other[1]], [one[1], one[0]], [one[0]], [one[0], one[1], one[1]]):
        with pytest.raises(CorruptObject, match="does not fit the others"):
            merge(mixture)
    attempt = new_attempt(6)
    misplaced = run.keys.receipt(attempt, 0)
    store.put(misplaced, store.get(run.keys.receipt(Attempt.parse(one[0].receipt.attempt), 0)))
    with pytest.raises(CorruptObject, match="another rank or attempt"):
        read_receipt(run, attempt, 0)
    assert not advance(run, attempt)


def test_a_different_manifest_is_not_committed(store: Store) -> None:
    run, attempt = Run(store, RUN), new_attempt()
    receipts = write_ranks(store, attempt)
    store.put(run.keys.manifest(attempt), pack_manifest(merge(write_ranks(store, new_attempt()))))
    with pytest.raises(CorruptObject, match="does not match the receipts"):
        commit_attempt(run, receipts)
    assert read_outcome(run, attempt) is None


# Lost replies.


@pytest.mark.parametrize("committed", [True, False], ids=["commit", "abort"])
def test_a_lost_reply_on_the_outcome_is_a_success(store: Store, committed: bool) -> None:
    attempt = new_attempt()
    receipts = write_ranks(store, attempt)
    call = partial(commit_attempt, receipts=receipts) if committed else partial(decide, attempt=attempt, committed=None)
    at = 2 if committed else 0
    faults = Faults(at, "after")
    outcome = call(Run(FaultyStore(store, faults), RUN))
    assert faults.calls[at].startswith("put_if_absent gpt/commits/")
    assert outcome == read_outcome(Run(store, RUN), attempt)
    assert (outcome.committed is not None) is committed


@pytest.mark.parametrize(("retry_s", "requests"), [(0.0, 6), (1e-9, 1)], ids=["store", "store that retries"])
def test_an_outcome_that_cannot_be_learned_is_not_guessed(store: Store, retry_s: float, requests: int) -> None:
    """Tried three times; but not on a store that has tried for two minutes before each of its errors."""
    attempt = new_attempt()

    class Dead(Faults):
        def around(self, what: str, call: object) -> object:  # type: ignore[override]
            self.calls.append(what)
            raise StoreUnavailable("dead")

    faults = Dead()
    with pytest.raises(StoreUnavailable):
        decide(Run(RetryingStore(FaultyStore(store, faults), retry_s), RUN), attempt, None)
    assert len(faults.calls) == requests
    assert read_outcome(Run(store, RUN), attempt) is None


# Every call of a whole save fails once: before it happens, and after.


def save(store: Store, attempt: Attempt) -> None:
    write_ranks(store, attempt)
    roll_forward(Run(store, RUN), attempt)


@here_and_in_memory
@pytest.mark.parametrize("mode", ["before", "after"])
def test_a_save_that_fails_at_any_call(store: Store, mode: Mode) -> None:
    run, old = Run(store, RUN), write_checkpoint(store, RUN, 1, SMALL)
    calls = count_calls(store, lambda faulty: save(faulty, new_attempt(2)))
    assert calls > 15
    survived = 0
    for k in range(calls):
        attempt = new_attempt(3 + k)
        try:
            save(FaultyStore(store, Faults(k, mode)), attempt)
            survived += 1
        except StoreUnavailable:
            pass
        assert old in list_checkpoints(run)
        if k % 7 == 0:  # the whole of it now and then: everything is checked again at the end
            assert_legal(store)
        listed = {c.attempt for c in list_checkpoints(run)}
        assert (attempt in listed) == (read_outcome(run, attempt) is not None)
        if roll_forward(run, attempt) is None:
            save(store, new_attempt(3 + k))  # what the next save of a trainer does
        assert latest(run).step == 3 + k
    assert_legal(store)
    assert survived >= 1, "a lost reply on the outcome is not a failure, nor a lost call"


# Committer against collector.


@dataclass
class Scene:
    """An attempt whose last rank is late, so late that a collector takes it for an orphan."""

    store: Store
    attempt: Attempt
    clock: MovableClock

    @staticmethod
    def set_up(store: Store) -> Scene:
        attempt = new_attempt()
        write_rank(store, RUN, attempt, {f"r0/{n}": a for n, a in SMALL.items()}, 0, 2)
        return Scene(store, attempt, MovableClock(48 * 3600))

    def commit(self, store: Store) -> Outcome | None:
        run = Run(store, RUN)
        try:
            [first] = read_receipts(run, self.attempt, [0])
            last = write_rank(store, RUN, self.attempt, {f"r1/{n}": a for n, a in SMALL.items()}, 1, 2)
            return commit_attempt(run, [first, last])
        except AttemptAborted:
            return None

    def collect(self, store: Store) -> None:
        collect(Run(store, RUN, self.clock))

    def check(self) -> bool:
        """Whether it was committed; nothing may be deleted under a committed outcome."""
        run = Run(self.store, RUN)
        outcome, listed = read_outcome(run, self.attempt), list_checkpoints(run)
        assert [c.attempt for c in listed] == ([self.attempt] if outcome and outcome.committed else [])
        for checkpoint in listed:
            report = verify(StoreSource(self.store), checkpoint, threads=1)
            assert report.ok, report.problems
        return bool(listed)


@in_memory
def test_a_collector_at_every_moment_of_a_commit(store: Store) -> None:
    results, commit = set(), lambda on, scene: scene.commit(on)
    # From the moment the committer knows the first receipt.
    for scene, _, _ in at_every_call(store, Scene.set_up, commit, lambda scene: scene.collect(store), first=1):
        results.add(scene.check())
        scene.collect(store)
        scene.check()
    assert results == {True, False}, "the collector must win some and lose some"


@in_memory
def test_a_commit_at_every_moment_of_a_collection(store: Store) -> None:
    def commit(scene: Scene) -> Outcome | None:
        try:
            return scene.commit(store)
        except Exception:
            return None  # its first receipt is gone: the collector has won

    results = set()
    for scene, _, (outcome,) in at_every_call(store, Scene.set_up, lambda on, scene: scene.collect(on), commit):
        assert bool(outcome) == scene.check()
        results.add(scene.check())
    assert results == {True, False}


@here_and_in_memory
def test_committer_and_collector_in_threads(store: Store) -> None:
    for _ in range(40):
        scene = Scene.set_up(store)
        committed, _ = race(partial(scene.commit, store), partial(scene.collect, store))
        assert isinstance(committed, Outcome) == scene.check(), committed
        scene.collect(store)
        scene.check()
        clear(store)


@here_and_in_memory
def test_many_committers_of_one_attempt(store: Store) -> None:
    run = Run(store, RUN)
    for step in range(15):
        attempt = new_attempt(step)
        receipts = write_ranks(store, attempt)
        results = race(
            partial(commit_attempt, run, receipts), partial(roll_forward, run, attempt),
            partial(roll_forward, run, attempt), partial(commit_attempt, run, receipts),
        )  # fmt: skip
        outcome = present(read_outcome(run, attempt))
        assert results == [outcome] * 4, "all of them learn the same decision"
    assert_legal(store)


@in_memory
def test_a_committer_that_sleeps_through_a_prune_commits_nothing_visible(store: Store) -> None:
    """Why tombstones are kept: the sleeper has all receipts in memory and creates an outcome over no data."""
    run, attempt = Run(store, RUN), new_attempt()
    receipts = write_ranks(store, attempt)
    roll_forward(run, attempt)
    delete_checkpoint(run, latest(run).attempt, "prune", force=True)
    assert commit_attempt(run, receipts).committed is not None
    assert list_checkpoints(run) == []
    collect(run)
    assert list(store.list(run.keys.attempt(attempt))) == []
    assert read_outcome(run, attempt) is None


def test_two_collectors_at_once(store: Store) -> None:
    clock = MovableClock(48 * 3600)
    run = Run(store, RUN, clock)
    for step in range(10):
        write_rank(store, RUN, new_attempt(step), sample_arrays(step), 0, 2)
    results = race(*(partial(collect, run) for _ in range(3)))
    assert not [r for r in results if isinstance(r, BaseException)], results
    assert list(store.list(run.keys.attempts)) == []


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_the_last_save_of_a_step_counts_in_any_order_of_roll_forward(store: Store, order: tuple[int, ...]) -> None:
    """Rank 0's saver died before it committed any of them. The order of listings is that of hashes."""
    attempts = [new_attempt() for _ in range(3)]
    for number, attempt in enumerate(attempts):
        write_rank(store, RUN, attempt, SMALL, earlier=attempts[:number])
    clock = MovableClock()
    for number in order:
        advance(Run(store, RUN, clock), attempts[number])
        clock.advance(-10)  # another host's
    assert latest(Run(store, RUN)).attempt == attempts[2]
    assert not undecided_attempts(Run(store, RUN))


def test_a_receipt_ends_no_save_of_another_step_or_trainer(store: Store) -> None:
    others = [new_attempt(4), Attempt(5, new_attempt().ulid, generation=1)]
    write_rank(store, RUN, others[0], SMALL)
    attempt = new_attempt()
    write_rank(store, RUN, attempt, SMALL, earlier=[*others, attempt])
    assert advance(Run(store, RUN), attempt)
    assert undecided_attempts(Run(store, RUN)) == others[:1]
    assert read_outcome(Run(store, RUN), others[1]) is None
