"""Rank 0 reads receipts as they appear, once each; the pauses of all ranks together spare the store."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import repeat
from pathlib import Path

import pytest

from ckpt.saver import commit
from ckpt.saver.commit import Committer, _first_pause, _pause
from ckptstore.codecs.chunk_codecs import Buffer
from ckptstore.commits.catalog import State, list_checkpoints
from ckptstore.commits.commit import abort_attempt, read_outcome
from ckptstore.commits.generations import Session, begin_generation
from ckptstore.errors import RankFailed, StoreUnavailable, Superseded
from ckptstore.format.documents import Outcome
from ckptstore.names import Attempt, RunKeys, derive_ulid, new_ulid
from ckptstore.retention.deletion import advance
from ckptstore.run import Run
from ckptstore.stores import Store, WrappedStore, open_store
from tests.ckpt.saver.test_pipeline import setup
from tests.support.checkpoints import sample_arrays, write_rank
from tests.support.waiting import present, wait_until

ATTEMPT = Attempt(7, new_ulid(1_700_000_000.0))
RANKS = 3


class Gets(WrappedStore):
    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.keys: list[str] = []
        self.vanishing = ""
        """Is listed, and gone when it is read."""

    def get(self, key: str) -> bytes:
        self.keys.append(key)
        if key == self.vanishing:
            self.delete_many([key])
        return super().get(key)


@pytest.fixture
def store(tmp_path: Path) -> Gets:
    return Gets(open_store(str(tmp_path)))


def begin(store: Store) -> tuple[Committer, list[Outcome | BaseException]]:
    """Rank 0 has written its receipt and waits for the others."""
    ended: list[Outcome | BaseException] = []
    own = write_rank(store, "r", ATTEMPT, sample_arrays(), 0, RANKS)
    committer = Committer(Run(store, "r"), setup(store, world_size=RANKS, timeout=3600.0))
    committer.add(ATTEMPT, own, ended.append)
    return committer, ended


def test_receipts_are_read_once_and_before_the_last_one_is_there(store: Gets) -> None:
    committer, ended = begin(store)
    keys = [RunKeys("r").receipt(ATTEMPT, rank) for rank in range(RANKS)]
    write_rank(store, "r", ATTEMPT, {}, 2, RANKS)
    wait_until(lambda: keys[2] in store.keys)
    assert not ended
    write_rank(store, "r", ATTEMPT, {}, 1, RANKS)
    committer.close()
    assert [type(result) for result in ended] == [Outcome]
    assert [store.keys.count(key) for key in keys] == [0, 1, 1]


def test_a_receipt_that_a_collector_deletes_does_not_hide_who_failed(store: Gets) -> None:
    store.vanishing = RunKeys("r").receipt(ATTEMPT, 2)
    store.put(store.vanishing, b"")
    abort_attempt(Run(store, "r"), ATTEMPT, 1, "disk full")
    committer, ended = begin(store)
    committer.close()
    assert store.vanishing in store.keys
    assert [type(result) for result in ended] == [RankFailed]


def test_pauses_grow_with_the_number_of_ranks() -> None:
    here = open_store("memory://pauses")
    few, many = (setup(here, rank=5, world_size=size) for size in (8, 16_384))
    assert _first_pause(few) < 0.05
    assert _pause(few, 0, 0.02, 0.02) == 0.02
    first = [_first_pause(setup(here, rank=rank, world_size=16_384)) for rank in (1, 8_192, 16_383)]
    assert max(first) - min(first) > 16  # a thousand looks a second
    assert _pause(many, 0, 0.02, 0.02) > 16
    leader = setup(here, rank=0, world_size=16_384)
    assert _first_pause(leader) == 0
    assert 0.1 < _pause(leader, 0, 30.0, 0.5) < 0.5
    assert _pause(leader, 16_000, 30.0, 0.5) < 0.1, "few receipts are missing"
    assert _pause(few, 0, 30.0, 0.5, urgent=True) == 0.1


def test_an_expedited_commit_does_not_wait_for_the_next_look(store: Gets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "_pause", lambda *args: _pause(*args) if args[-1] else 3600.0)
    committer, ended = begin(store)
    wait_until(lambda: committer._waiting[0].look_at > time.monotonic() + 1800)
    committer.expedite()
    for rank in (1, 2):
        write_rank(store, "r", ATTEMPT, {}, rank, RANKS)
    committer.close()
    assert [type(result) for result in ended] == [Outcome]


def test_rank_0_does_not_wait_once_another_trainer_continues(store: Gets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "_LOST_S", (0.0, 0.0))
    run = Run(store, "r")
    for parent in (None, ATTEMPT):
        begin_generation(run, Session(new_ulid(1_700_000_000.0), parent))
    attempt = replace(ATTEMPT, generation=1)
    own = write_rank(store, "r", attempt, sample_arrays(), 0, RANKS)
    committer, ended = Committer(run, setup(store, world_size=RANKS, timeout=3600.0)), list[Outcome | BaseException]()
    committer.add(attempt, own, ended.append)
    committer.close()
    assert [type(result) for result in ended] == [Superseded]
    assert present(read_outcome(run, attempt)).committed is None


class Away(WrappedStore):
    is_away = True

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        if self.is_away and key.startswith(RunKeys("r").commits):
            raise StoreUnavailable("away", "")
        return super().put_if_absent(key, data)


def test_a_save_that_could_not_be_committed_does_not_replace_a_later_one_of_its_step(tmp_path: Path) -> None:
    store = Away(open_store(str(tmp_path), retried=False))
    first, second = (Attempt(7, derive_ulid(ATTEMPT.ulid, 7, number)) for number in range(2))
    committer, ended = Committer(Run(store, "r"), setup(store, world_size=1)), list[Outcome | BaseException]()
    committer.add(first, write_rank(store, "r", first, sample_arrays()), ended.append)
    wait_until(lambda: ended)
    assert isinstance(ended[0], StoreUnavailable)
    store.is_away = False
    committer.add(second, write_rank(store, "r", second, sample_arrays(), earlier=[first]), ended.append)
    committer.close()
    assert isinstance(ended[1], Outcome)
    assert not advance(Run(store, "r"), first), "as at a restart"
    assert [c.attempt for c in list_checkpoints(Run(store, "r"))] == [second]


def test_the_last_save_of_a_step_counts_although_the_clock_was_set_back(store: Gets) -> None:
    attempts = [Attempt(7, derive_ulid(ATTEMPT.ulid, 7, number)) for number in range(3)]
    times = iter([1_700_009_000.0, 1_700_005_000.0, 1_700_001_000.0])
    found: list[Outcome | BaseException] = []
    for number, attempt in enumerate(attempts):
        run = Run(store, "r", repeat(next(times)).__next__)
        committer = Committer(run, setup(store, world_size=1))  # each of a saver that was started again
        committer.add(attempt, write_rank(store, "r", attempt, {}, earlier=attempts[:number]), found.append)
        committer.close()
    assert all(isinstance(outcome, Outcome) for outcome in found)
    states = {c.attempt: c.state for c in list_checkpoints(Run(store, "r"))}
    assert states == dict.fromkeys(attempts[:2], State.SUPERSEDED) | {attempts[2]: State.COMMITTED}


def test_a_save_waits_for_an_earlier_one_of_its_step(store: Gets) -> None:
    committer, ended = begin(store)
    later = Attempt(7, derive_ulid(ATTEMPT.ulid, 7, 1))
    own = write_rank(store, "r", later, sample_arrays(), 0, RANKS, earlier=[ATTEMPT])
    for attempt, ranks in ((later, (1, 2)), (ATTEMPT, (1,))):
        for rank in ranks:
            write_rank(store, "r", attempt, {}, rank, RANKS)
    committer.add(later, own, ended.append)
    wait_until(lambda: RunKeys("r").receipt(ATTEMPT, 1) in store.keys)
    assert not ended
    write_rank(store, "r", ATTEMPT, {}, 2, RANKS)
    committer.close()
    assert [result.attempt for result in ended if isinstance(result, Outcome)] == [str(ATTEMPT), str(later)]
