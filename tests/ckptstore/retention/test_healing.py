from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from ckptstore import names
from ckptstore.clock import system_clock
from ckptstore.commits.audit import read_log
from ckptstore.commits.catalog import Checkpoint, latest, quarantined_attempts
from ckptstore.commits.leases import active_leases
from ckptstore.errors import StoreUnavailable
from ckptstore.format.records import Action
from ckptstore.reading.verify import Verification
from ckptstore.retention.deletion import delete_checkpoint
from ckptstore.retention.scrubbing import due_for_scrub, scrub, verified_at
from ckptstore.run import Run
from ckptstore.stores import Store, open_store
from tests.support.checkpoints import RUN, flipped, sample_arrays, write_checkpoint
from tests.support.stores import DictStore, FakeClock, Faults, FaultyStore

SHARD = names.shard_name(0)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(open_store(str(tmp_path / "store")), RUN)


def heal(run: Run, copies: Sequence[Store] = (), store: Store | None = None) -> list[Verification]:
    """Scrub everything that is not known to be intact."""
    due = due_for_scrub([run], damaged=True)
    return list(scrub(store or run.store, due, "me", system_clock, heal_from=copies))


def flip(run: Run, key: str, at: int = 1000) -> bytes:
    """Damage an object; returns what it was."""
    intact = run.store.get(key)
    run.store.put(key, flipped(intact, at))
    return intact


def copy_of(run: Run, folder: Path) -> Store:
    copy = open_store(str(folder / "copy"))
    for info in list(run.store.list("")):
        copy.put(info.key, run.store.get(info.key))
    return copy


def chain(run: Run, base: bool) -> list[Checkpoint]:
    """Two checkpoints of the same arrays; base: the second references the first."""
    first = write_checkpoint(run.store, RUN, 1, sample_arrays(), statistics=True)
    return [first, write_checkpoint(run.store, RUN, 2, sample_arrays(), base=first.attempt if base else None)]


def check_healed(run: Run, keys: dict[str, bytes]) -> None:
    """The objects have their old bytes, and nothing is known to be damaged."""
    assert ({key: run.store.get(key) for key in keys}, quarantined_attempts(run)) == (keys, [])
    healings = [record for record in read_log(run) if record.action is Action.HEAL]
    assert (len(healings), healings[0].by) == (len(keys), "me")


@pytest.mark.parametrize("damaged", [0, 1])
def test_a_chunk_is_healed_from_another_checkpoint(run: Run, damaged: int) -> None:
    victim = chain(run, base=False)[damaged]
    key = run.keys.shard(victim.attempt, SHARD)
    intact = flip(run, key)
    list(scrub(run.store, [victim], "me", system_clock))
    assert quarantined_attempts(run) == [victim.attempt]
    results = {found.checkpoint.id: found for found in heal(run)}
    assert all(found.ok for found in results.values())
    assert results[victim.id].healed == (key,)
    check_healed(run, {key: intact})
    assert victim.attempt in verified_at(run)
    assert latest(run).step == 2


def test_all_checkpoints_that_need_a_healed_shard_leave_quarantine(run: Run) -> None:
    first, second = chain(run, base=True)
    third = write_checkpoint(run.store, RUN, 3, sample_arrays())
    key = run.keys.shard(first.attempt, SHARD)
    intact = flip(run, key)
    assert [found.ok for found in scrub(run.store, [first, second, third], "me", system_clock)] == [False, False, True]
    assert all(found.ok for found in heal(run))
    check_healed(run, {key: intact})


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_everything_but_the_outcome_is_healed_from_a_copy(run: Run, damage: str, tmp_path: Path) -> None:
    only = write_checkpoint(run.store, RUN, 1, sample_arrays(), statistics=True)
    copy, keys = copy_of(run, tmp_path), run.keys
    intact = {
        key: run.store.get(key)
        for key in (keys.shard(only.attempt, SHARD), keys.manifest(only.attempt), keys.receipt(only.attempt, 0))
    }
    for key, data in intact.items():
        if damage == "flip":
            flip(run, key, 100)
        elif damage == "truncate":
            run.store.put(key, data[:50])
        else:
            run.store.delete_many([key])
    (result,) = heal(run, [copy])
    assert result.ok
    assert set(result.healed) == intact.keys()
    check_healed(run, intact)


def test_a_manifest_is_healed_from_the_receipts(run: Run) -> None:
    only = write_checkpoint(run.store, RUN, 1, sample_arrays(), statistics=True)
    key = run.keys.manifest(only.attempt)
    intact = flip(run, key, 50)
    assert [found.ok for found in heal(run)] == [True]
    check_healed(run, {key: intact})


def test_what_nothing_else_holds_stays_as_it_is(run: Run) -> None:
    first = write_checkpoint(run.store, RUN, 1, sample_arrays(seed=1))
    write_checkpoint(run.store, RUN, 2, sample_arrays(seed=2))
    key = run.keys.shard(first.attempt, SHARD)
    flip(run, key)
    damaged = run.store.get(key)
    (result,) = (found for found in heal(run) if found.checkpoint.attempt == first.attempt)
    assert not result.ok
    assert any("nothing else holds the bytes of chunk" in problem for problem in result.problems)
    assert (run.store.get(key), quarantined_attempts(run)) == (damaged, [first.attempt])


def test_damaged_holders_are_not_believed(run: Run, tmp_path: Path) -> None:
    """The same byte is wrong in the other checkpoint, and in a copy with valid documents."""
    first, second = chain(run, base=False)
    copy = copy_of(run, tmp_path)
    flip(run, run.keys.shard(second.attempt, SHARD))
    flip(run, run.keys.shard(first.attempt, SHARD))
    for each in (first, second):
        flip(Run(copy, RUN), run.keys.shard(each.attempt, SHARD))
    assert [found.ok for found in heal(run, [copy])] == [False, False]


@pytest.mark.parametrize("mode", ["before", "after"])
def test_an_interrupted_healing_leaves_the_old_or_the_new_object(run: Run, mode: str) -> None:
    victim = chain(run, base=False)[0]
    key = run.keys.shard(victim.attempt, SHARD)
    intact, damaged = flip(run, key), run.store.get(key)
    failed = 0
    while True:
        faults = Faults(failed, mode)  # type: ignore[arg-type]
        run.store.put(key, damaged)
        try:
            results = list(scrub(FaultyStore(run.store, faults), [victim], "me", system_clock, heal_from=()))
        except StoreUnavailable:
            assert run.store.get(key) in (damaged, intact)
            failed += 1
            continue
        break
    assert failed > 20
    assert ([found.ok for found in results], run.store.get(key)) == ([True], intact)
    assert [info.key for info in run.store.list(run.keys.attempt(victim.attempt)) if ".ckpt" in info.key] == [key]


def test_a_checkpoint_is_held_however_long_its_healing_takes() -> None:
    clock = FakeClock()
    run = Run(DictStore(clock), RUN, clock)
    checkpoint = write_checkpoint(run.store, RUN, 1, sample_arrays(1), clock=clock)
    calls = 0

    def slow(_: int) -> None:
        nonlocal calls
        calls += 1
        assert checkpoint.attempt in active_leases(run), f"call {calls}"
        clock.now += 5 * 60  # several threads call this at once, and all of it must pass within an hour

    flip(run, run.keys.shard(checkpoint.attempt, SHARD))
    (found,) = scrub(run.store, [checkpoint], "me", clock, throttle=slow, heal_from=())
    assert not found.ok
    assert calls * 5 > 2 * 60
    assert not active_leases(run)


@pytest.mark.parametrize("all_read", [False, True])
@pytest.mark.parametrize("ranks", [None, (2,)])
def test_a_checkpoint_deleted_during_a_sleep_has_no_finding(ranks: tuple[int, ...] | None, all_read: bool) -> None:
    """Damaged, if it is deleted before all of it was read, or intact."""
    clock = FakeClock()
    run = Run(DictStore(clock), RUN, clock)
    checkpoint = write_checkpoint(run.store, RUN, 1, sample_arrays(1), clock=clock)
    left = checkpoint.stored_bytes if all_read else 1
    lock = threading.Lock()

    def sleep(count: int) -> None:
        nonlocal left
        with lock:
            before, left = left, left - count
            if left <= 0 < before:
                clock.now += 3 * 3600
                delete_checkpoint(run, checkpoint.attempt, "test", force=True)

    assert list(scrub(run.store, [checkpoint], "me", clock, throttle=sleep, ranks=ranks)) == []
    assert (quarantined_attempts(run), verified_at(run)) == ([], {})
