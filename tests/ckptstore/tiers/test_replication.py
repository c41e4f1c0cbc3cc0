"""Replication: the remote store gets the same checkpoints in the same lineage, or nothing; whatever fails in
between."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptstore.analysis.statistics import read_statistics
from ckptstore.clock import system_clock
from ckptstore.commits.catalog import Checkpoint, State, latest, list_checkpoints
from ckptstore.commits.commit import commit_attempt, receipt_ranks
from ckptstore.commits.generations import Session, begin_generation, list_generations, newest_generation
from ckptstore.commits.labels import LabelChange, change_labels
from ckptstore.commits.leases import active_leases
from ckptstore.errors import AttemptAborted, CorruptObject, StoreUnavailable, Superseded
from ckptstore.names import Attempt, Reference, new_ulid, shard_name
from ckptstore.reading.source import StoreSource
from ckptstore.reading.verify import verify
from ckptstore.retention.deletion import collect
from ckptstore.retention.pins import pinned
from ckptstore.run import Run
from ckptstore.stores import Store, open_store
from ckptstore.tiers.replication import (
    QUEUED,
    UNREPLICABLE,
    Known,
    copy_rank,
    enqueue,
    mark_unreplicable,
    queued,
    replicate,
    replication_queue,
    trim,
)
from ckptstore.tiers.source import TieredSource
from tests.support.checkpoints import (
    at_every_call,
    clear,
    failing_at_every_call,
    flipped,
    sample_arrays,
    write_checkpoint,
    write_rank,
)
from tests.support.stores import CountingStore, Faults, FaultyStore, Mode, MovableClock
from tests.support.waiting import present


class Tiers:
    """A local and a remote store, and trainers that save locally."""

    def __init__(self, folder: Path) -> None:
        self.local = Run(open_store(f"memory://{folder.name}/local"), "gpt")
        self.remote = Run(open_store(f"memory://{folder.name}/remote"), "gpt")

    def begin(self, parent: Checkpoint | None = None, seen: int = 0, run: Run | None = None) -> int:
        session = Session(new_ulid(system_clock()), parent.attempt if parent else None, seen)
        return begin_generation(run or self.local, session).number

    def save(
        self, step: int, number: int, base: Checkpoint | None = None, run: Run | None = None, **more: Any
    ) -> Checkpoint:
        arrays = {"model/base": np.arange(4000, dtype=np.float32), "model/step": np.full(1000, step)}
        options = {"generation": number, "base": base.attempt if base else None, "statistics": True} | more
        return write_checkpoint((run or self.local).store, step=step, arrays=arrays, **options)

    def replicate_all(self) -> None:
        for attempt in queued(self.local):
            replicate(self.local, self.remote, attempt)


@pytest.fixture
def tiers(tmp_path: Path) -> Tiers:
    return Tiers(tmp_path)


def objects(run: Run, attempt: Attempt) -> dict[str, bytes]:
    return {info.key: run.store.get(info.key) for info in run.store.list(run.keys.attempt(attempt))}


def listed(run: Run) -> list[tuple[int, int, State]]:
    return [(c.attempt.generation, c.step, c.state) for c in list_checkpoints(run)]


@pytest.mark.parametrize("statistics", [True, "apart"])
def test_a_copy_is_the_same_checkpoint(tiers: Tiers, statistics: object) -> None:
    one = tiers.save(10, tiers.begin(), statistics=statistics)
    change_labels(tiers.local, one.attempt, LabelChange({"best": ""}, {"val": 1.5}))
    enqueue(tiers.local, one.attempt)
    assert replication_queue(tiers.local, {}) == [one]
    replicated = present(replicate(tiers.local, tiers.remote, one.attempt))
    assert (replicated.id, replicated.manifest_digest) == (one.id, one.manifest_digest)
    assert objects(tiers.remote, one.attempt) == objects(tiers.local, one.attempt)
    assert len(objects(tiers.remote, one.attempt)) == 3 + (statistics == "apart")
    assert not read_statistics(StoreSource(tiers.remote.store), replicated).missing
    assert replication_queue(tiers.local, {}) == []
    found = StoreSource(tiers.remote.store).find(Reference("gpt", 10))
    assert (found.tags, found.metrics["val"]) == ({"best": ""}, 1.5)
    assert verify(StoreSource(tiers.remote.store), found).ok


def test_referenced_checkpoints_are_replicated_first(tiers: Tiers) -> None:
    generation = tiers.begin()
    base = tiers.save(10, generation)
    enqueue(tiers.local, base.attempt)
    middle = tiers.save(20, generation, base)
    newest = tiers.save(30, generation, middle)
    assert newest.referenced_bytes
    enqueue(tiers.local, newest.attempt)
    tiers.replicate_all()
    assert [step for _, step, _ in listed(tiers.remote)] == [30, 10]  # nothing of 20 is needed
    assert verify(StoreSource(tiers.remote.store), latest(tiers.remote)).ok


def test_a_rank_without_a_shard_is_replicated_too(tiers: Tiers) -> None:

    attempt = Attempt(5, new_ulid(system_clock()), generation=tiers.begin())
    receipts = [write_rank(tiers.local.store, "gpt", attempt, sample_arrays() if not r else {}, r, 3) for r in range(3)]
    commit_attempt(tiers.local, receipts)
    enqueue(tiers.local, attempt)
    tiers.replicate_all()
    assert verify(StoreSource(tiers.remote.store), latest(tiers.remote)).ok
    assert latest(tiers.remote).world_size == 3


def test_the_lineage_is_the_same_in_both(tiers: Tiers) -> None:
    first = tiers.begin()
    saved = [tiers.save(step, first) for step in (10, 20, 30)]
    second = tiers.begin(saved[1])  # a rewind to 20
    saved += [tiers.save(step, second) for step in (25, 35)]
    third = tiers.begin(saved[-1])
    saved.append(tiers.save(40, third))
    for one in (saved[5], saved[0], saved[2], saved[1], saved[3]):  # in any order; 35 is not due
        enqueue(tiers.local, one.attempt)
    tiers.replicate_all()
    local = {(g, step): state for g, step, state in listed(tiers.local)}
    assert listed(tiers.remote) == [(g, s, local[g, s]) for g, s in [(3, 40), (2, 25), (1, 30), (1, 20), (1, 10)]]
    assert local[1, 30] is State.ABANDONED


def test_an_old_checkpoint_is_replicated_after_a_newer_generation_of_the_same_host(tiers: Tiers) -> None:
    first = tiers.begin()
    base, late = tiers.save(10, first), tiers.save(20, first)
    second = tiers.begin(late)
    newest = tiers.save(30, second, late)
    enqueue(tiers.local, newest.attempt)
    tiers.replicate_all()  # with 20, which it references
    enqueue(tiers.local, base.attempt)
    tiers.replicate_all()
    assert listed(tiers.remote) == listed(tiers.local)
    assert verify(StoreSource(tiers.remote.store), latest(tiers.remote)).ok


def test_another_trainer_that_went_on_elsewhere_wins(tiers: Tiers) -> None:
    first = tiers.begin()
    base = tiers.save(10, first)
    enqueue(tiers.local, base.attempt)
    tiers.replicate_all()
    elsewhere = tiers.begin(base, run=tiers.remote)  # on another host: it resumed from what was remote
    other = tiers.save(11, elsewhere, run=tiers.remote)
    for one in (tiers.save(20, first), tiers.save(30, tiers.begin(base))):
        enqueue(tiers.local, one.attempt)
        with pytest.raises(Superseded, match="generation 2"):
            replicate(tiers.local, tiers.remote, one.attempt)
        mark_unreplicable(tiers.local, one.attempt)
    assert listed(tiers.remote) == [(2, 11, State.COMMITTED), (1, 10, State.COMMITTED)]
    assert queued(tiers.local) == []
    assert list(pinned(tiers.local).values()) == [[UNREPLICABLE], [UNREPLICABLE]]
    # A trainer here that restored the other's checkpoint goes on, under a number that is free in both.
    third = tiers.begin(other, seen=newest_generation(tiers.remote))
    enqueue(tiers.local, tiers.save(40, third).attempt)
    tiers.replicate_all()
    assert (third, latest(tiers.remote).step, sorted(list_generations(tiers.remote))) == (3, 40, [1, 2, 3])
    with pytest.raises(Superseded):
        replicate(tiers.local, tiers.remote, next(c.attempt for c in list_checkpoints(tiers.local) if c.step == 20))


def test_a_number_that_is_only_local_is_filled_remotely(tiers: Tiers) -> None:
    tiers.begin(run=tiers.remote)
    seen, abandoned = tiers.begin(seen=1), [tiers.begin() for _ in range(2)]
    newest = tiers.begin()
    assert (seen, abandoned, newest) == (2, [3, 4], 5)
    enqueue(tiers.local, tiers.save(1, newest).attempt)
    tiers.replicate_all()
    assert sorted(list_generations(tiers.remote)) == [1, 2, 3, 4, 5]
    # An old job of the first trainer's kind sees that it is superseded: there is a generation 2.
    with pytest.raises(Superseded):
        tiers.save(7, 1, run=tiers.remote)


@pytest.mark.parametrize("mode", ["before", "after"])
def test_every_call_may_fail_and_the_copy_continues(tiers: Tiers, mode: Mode) -> None:
    generation = tiers.begin()
    base = tiers.save(10, generation)
    newest = tiers.save(20, generation, base)

    def work(on: Store, _: object) -> None:
        for one in (base, newest):
            enqueue(tiers.local, one.attempt)
        for attempt in queued(tiers.local):
            replicate(tiers.local, Run(on, "gpt"), attempt)

    for _ in failing_at_every_call(tiers.remote.store, lambda _: None, work, mode, more_than=20):
        assert {c.step for c in list_checkpoints(tiers.remote)} <= {10, 20}
        tiers.replicate_all()
        assert [step for _, step, _ in listed(tiers.remote)] == [20, 10]
        assert all(verify(StoreSource(tiers.remote.store), c).ok for c in list_checkpoints(tiers.remote))


def test_two_replicators_at_once(tiers: Tiers) -> None:
    generation = tiers.begin()
    base = tiers.save(10, generation)
    newest = tiers.save(20, generation, base)

    def set_up(_: Store) -> None:
        for one in (base, newest):
            enqueue(tiers.local, one.attempt)

    def work(on: Store, _: None) -> None:
        for one in (base, newest):
            try:
                replicate(tiers.local, Run(on, "gpt"), one.attempt)
            except StoreUnavailable:  # the other one had created the same shard just before
                replicate(tiers.local, Run(on, "gpt"), one.attempt)

    for _ in at_every_call(tiers.remote.store, set_up, work, lambda _: tiers.replicate_all()):
        assert [step for _, step, _ in listed(tiers.remote)] == [20, 10]
        assert all(verify(StoreSource(tiers.remote.store), c).ok for c in list_checkpoints(tiers.remote))


def test_damaged_statistics_are_left_behind(tiers: Tiers) -> None:
    one = tiers.save(10, tiers.begin())
    key = tiers.local.keys.shard(one.attempt, shard_name(0))
    data = tiers.local.store.get(key)
    tiers.local.store.put(key, data[:-9] + bytes(9))
    replicated = present(replicate(tiers.local, tiers.remote, one.attempt))
    assert tiers.remote.store.get(key) == data[: one.stored_bytes]
    assert verify(StoreSource(tiers.remote.store), replicated).ok
    with pytest.raises(CorruptObject, match="no statistics"):
        read_statistics(StoreSource(tiers.remote.store), replicated)


def test_damage_is_not_replicated(tiers: Tiers) -> None:
    one = tiers.save(10, tiers.begin())
    enqueue(tiers.local, one.attempt)
    key = tiers.local.keys.shard(one.attempt, "shard-00000.ckpt")
    tiers.local.store.put(key, flipped(tiers.local.store.get(key), 100))
    with pytest.raises(CorruptObject):
        tiers.replicate_all()
    assert (listed(tiers.remote), pinned(tiers.local)[one.attempt]) == ([], [QUEUED])


def test_each_outcome_is_read_once_however_long_the_replication_queue(tiers: Tiers) -> None:
    counting, known, generation = CountingStore(tiers.local.store), Known(), tiers.begin()
    local = replace(tiers.local, store=counting)
    for step in range(1, 6):
        one = tiers.save(step, generation)
        enqueue(local, one.attempt)
        assert (len(replication_queue(local, known)), trim(local, 1, known)) == (step, ())
    outcomes = [key for key, _ in counting.documents if key.startswith(local.keys.commits)]
    assert len(outcomes) == len(set(outcomes)) == 5
    tiers.replicate_all()
    assert len(trim(local, 1, known)) == 4
    trim(local, 1, known)
    assert list(known) == [one.attempt]


def test_the_checkpoints_of_the_remote_store_are_listed_only_for_a_new_generation(tiers: Tiers) -> None:
    calls = Faults()
    remote = replace(tiers.remote, store=FaultyStore(tiers.remote.store, calls))
    for _ in range(2):
        number = tiers.begin()
        for step, lists in ((1, 1), (2, 0)):
            one = tiers.save(10 * number + step, number)
            calls.calls.clear()
            replicate(tiers.local, remote, one.attempt)
            assert calls.calls.count(f"list {remote.keys.commits}") == lists


def test_the_local_tier_keeps_the_newest_and_the_replication_queue(tiers: Tiers) -> None:
    generation = tiers.begin()
    saved = [tiers.save(step, generation) for step in range(1, 6)]
    enqueue(tiers.local, saved[1].attempt)
    assert set(trim(tiers.local, 2, {})) == {saved[0].attempt, saved[2].attempt}
    assert [step for _, step, _ in listed(tiers.local)] == [5, 4, 2]
    tiers.replicate_all()
    assert trim(tiers.local, 2, {}) == (saved[1].attempt,)
    assert [step for _, step, _ in listed(tiers.local)] == [5, 4]
    referencing = tiers.save(6, generation, saved[4])
    assert trim(tiers.local, 1, {}) == (saved[3].attempt,)  # the newest references 5
    assert [step for _, step, _ in listed(tiers.local)] == [6, 5]
    assert verify(StoreSource(tiers.local.store), referencing).ok
    assert trim(tiers.local, 1, {}) == ()


def test_a_restore_takes_what_is_remote_once_another_trainer_has_begun_there(tiers: Tiers) -> None:
    first = tiers.begin()
    base, late = tiers.save(10, first), tiers.save(20, first)
    enqueue(tiers.local, base.attempt)
    tiers.replicate_all()
    source = TieredSource(tiers.local.store, tiers.remote.store, tiers.remote.store)
    assert source.latest("gpt").step == 20
    tiers.begin(base, run=tiers.remote)  # elsewhere; it has committed nothing yet
    assert source.latest("gpt").step == latest(tiers.remote).step == 10
    assert [(c.step, c.state) for c in source.checkpoints("gpt")] == [(20, State.ABANDONED), (10, State.COMMITTED)]
    with pytest.raises(Superseded):
        replicate(tiers.local, tiers.remote, late.attempt)


def test_a_copy_that_others_roll_forward_is_not_taken_for_another_trainer(tiers: Tiers) -> None:
    aborted = 0
    for at in count():
        first = tiers.begin()
        late = tiers.save(20, first)
        newest, faults = tiers.save(30, tiers.begin(late), late), Faults(at)
        with suppress(StoreUnavailable):
            replicate(tiers.local, Run(FaultyStore(tiers.remote.store, faults), "gpt"), newest.attempt)
        collect(tiers.remote)  # a daemon, or a restore on another host
        try:
            replicate(tiers.local, tiers.remote, newest.attempt)
        except AttemptAborted:
            aborted += 1  # it knows the newer generation, and not whose it is
        if len(faults.calls) <= at:
            break
        for run in (tiers.local, tiers.remote):
            clear(run.store)
    assert aborted < at / 5


def test_a_local_tier_that_fails_does_not_hide_what_is_remote(tiers: Tiers) -> None:
    one = tiers.save(10, tiers.begin())
    enqueue(tiers.local, one.attempt)
    tiers.replicate_all()
    for at in count():
        faults = Faults(at)
        source = TieredSource(FaultyStore(tiers.local.store, faults), tiers.remote.store, tiers.remote.store)
        found = source.latest("gpt")
        assert found.id == one.id
        assert source.manifest_data(found) == tiers.local.store.get(tiers.local.keys.manifest(one.attempt))
        if len(faults.calls) <= at:
            break


class Away(Faults):
    """The store goes away when the copy has its shard."""

    def around(self, what: str, call: Callable[[], object]) -> object:  # type: ignore[override]
        if what.startswith("put") and "/attempts/" in what and self.calls:
            raise StoreUnavailable("away")
        if what.startswith("commit"):
            self.calls.append(what)
        return call()


def interrupt(tiers: Tiers, attempt: Attempt) -> None:
    """Begin a copy; it holds what it has."""
    with pytest.raises(StoreUnavailable):
        replicate(tiers.local, replace(tiers.remote, store=FaultyStore(tiers.remote.store, Away())), attempt)
    assert objects(tiers.remote, attempt)
    assert active_leases(tiers.remote)


def test_a_copy_that_waits_for_days_is_continued_and_not_collected(tiers: Tiers) -> None:
    """A day after its last write, an attempt without an outcome is an orphan for the remote store's collection."""
    one = tiers.save(10, tiers.begin())
    enqueue(tiers.local, one.attempt)
    interrupt(tiers, one.attempt)
    assert not collect(replace(tiers.remote, clock=MovableClock(29 * 24 * 3600.0))).aborted
    tiers.replicate_all()
    assert verify(StoreSource(tiers.remote.store), latest(tiers.remote)).ok
    assert not active_leases(tiers.remote), "nothing holds it from now on"


def test_what_cannot_be_replicated_any_more_is_no_longer_kept(tiers: Tiers) -> None:
    one = tiers.save(10, tiers.begin())
    enqueue(tiers.local, one.attempt)
    interrupt(tiers, one.attempt)
    tiers.begin(run=tiers.remote)  # another trainer
    with pytest.raises(Superseded):
        replicate(tiers.local, tiers.remote, one.attempt)
    assert not active_leases(tiers.remote)
    later = replace(tiers.remote, clock=MovableClock(2 * 24 * 3600.0))
    assert collect(later).aborted == [tiers.remote.id_of(one.attempt)]


def test_ranks_that_copy_their_own_shards_leave_rank_0_the_commit(tiers: Tiers) -> None:
    """Each host has the shards of its ranks on its own disk; rank 0 would read those of all."""
    number = tiers.begin()
    attempt = Attempt(5, new_ulid(system_clock()), generation=number)
    arrays = [{f"model/{rank}": np.full(5000, rank, np.float32)} for rank in range(3)]
    receipts = [
        write_rank(tiers.local.store, "gpt", attempt, own, rank=rank, world_size=3) for rank, own in enumerate(arrays)
    ]
    commit_attempt(tiers.local, receipts)
    enqueue(tiers.local, attempt)
    copied: list[int] = []
    for rank in (1, 2):
        copy_rank(tiers.local, tiers.remote, attempt, rank, copied.append)
    assert not list_checkpoints(tiers.remote)
    others = sum(copied)
    assert replicate(tiers.local, tiers.remote, attempt, copied.append, own=0) is not None
    [copy] = list_checkpoints(tiers.remote)
    assert verify(StoreSource(tiers.remote.store), copy).ok
    assert 0 < sum(copied) - others == sum(copied) // 3
    copy_rank(tiers.local, tiers.remote, attempt, 1, copied.append)
    assert sum(copied) == 3 * (sum(copied) - others), "it is decided"


def test_a_rank_copies_what_its_checkpoint_references(tiers: Tiers) -> None:
    """Otherwise the replicator of rank 0 waits for receipts that no rank writes."""
    generation = tiers.begin()
    first, second = (Attempt(step, new_ulid(system_clock()), generation=generation) for step in (5, 6))
    for attempt, base in ((first, None), (second, first)):
        written = partial(write_rank, tiers.local.store, "gpt", attempt, world_size=2, base=base)
        commit_attempt(tiers.local, [written({f"model/{rank}": np.ones(9)}, rank=rank) for rank in range(2)])
    copy_rank(tiers.local, tiers.remote, second, 1, lambda _: None)
    assert receipt_ranks(tiers.remote, first) == receipt_ranks(tiers.remote, second) == {1}


def test_a_rank_that_does_not_copy_its_shards_is_waited_for_and_replaced(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptstore.tiers.replication._PATIENCE_S", 0.3)
    attempt = Attempt(5, new_ulid(system_clock()), generation=tiers.begin())
    receipts = [
        write_rank(tiers.local.store, "gpt", attempt, {f"model/{rank}": np.ones(9)}, rank=rank, world_size=2)
        for rank in range(2)
    ]
    commit_attempt(tiers.local, receipts)
    assert replicate(tiers.local, tiers.remote, attempt, own=0) is not None
    [copy] = list_checkpoints(tiers.remote)
    assert verify(StoreSource(tiers.remote.store), copy).ok
