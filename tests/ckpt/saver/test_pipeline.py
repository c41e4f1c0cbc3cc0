from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from msgspec.structs import replace

from ckpt.saver.messages import Done, Failed, Released, Report, SaveJob, SaveProgress, Setup
from ckpt.saver.pipeline import SavePipeline, coding_policy
from ckptstore.clock import system_clock
from ckptstore.codecs.chunk_codecs import POLICIES
from ckptstore.commits.commit import read_outcome, read_receipt, receipt_ranks, roll_forward
from ckptstore.commits.generations import NewAttempt
from ckptstore.commits.leases import active_leases, take_lease
from ckptstore.commits.references import referenced_attempts
from ckptstore.format.shards import CHUNK_BYTES, Placed, Slice
from ckptstore.names import Attempt, RunKeys, new_ulid
from ckptstore.reading.source import StoreSource
from ckptstore.reading.verify import verify
from ckptstore.retention.deletion import undecided_attempts
from ckptstore.run import Run
from ckptstore.stores import Store, open_store
from tests.ckpt.saver.attempts import new_attempt, new_job, new_setup, stored
from tests.support.checkpoints import write_rank
from tests.support.stores import Faults, FaultyStore
from tests.support.waiting import wait_until

COUNT = 3_000_000
RAW = np.random.default_rng(0).standard_normal(COUNT).astype(np.float32).data.cast("B")


def setup(store: Store, rank: int = 0, world_size: int = 1, timeout: float = 20.0) -> Setup:
    return new_setup(store.url, rank=rank, world_size=world_size, compress="fast", peer_timeout_s=timeout)


def job(attempt: NewAttempt, number: int = 1, rows: bool = True) -> SaveJob:
    return new_job(attempt, COUNT if rows else 0, number=number, local={"rng": number})


def run(store: Store, what: Setup, jobs: list[SaveJob]) -> list[Report]:
    reports: list[Report] = []
    pipeline = SavePipeline(store, what, reports.append)
    for one in jobs:
        pipeline.submit(one, RAW if one.slot is not None else memoryview(b""))
    pipeline.close()
    return reports


@pytest.fixture
def attempt() -> NewAttempt:
    return new_attempt(7)


@pytest.mark.parametrize(
    ("compress", "url", "expected"),
    [
        ("auto", "file:///checkpoints", "off"), ("auto", "/checkpoints", "off"), ("auto", "memory://m", "off"),
        ("auto", "s3://bucket/prefix", "fast"), ("auto", "gs://bucket", "fast"),
        ("max", "file:///checkpoints", "max"), ("off", "s3://bucket", "off"),
    ],
)  # fmt: skip
def test_the_store_decides_about_compression_unless_the_setting_does(compress: str, url: str, expected: str) -> None:
    assert coding_policy(compress, url) is POLICIES[expected]


def test_progress_then_release_then_commit(store: Store, attempt: NewAttempt) -> None:
    reports = run(store, setup(store), [job(attempt)])
    kinds = [type(report) for report in reports]
    assert kinds == [*[SaveProgress] * (len(kinds) - 2), Released, Done]
    assert isinstance(reports[-3], SaveProgress)
    assert reports[-3].done_bytes == len(RAW)
    done = reports[-1]
    assert isinstance(done, Done)
    assert done.outcome.attempt == str(stored(attempt))
    assert verify(StoreSource(store), StoreSource(store).latest("r")).ok


def test_small_chunks_are_not_reported_one_by_one(store: Store, attempt: NewAttempt) -> None:
    count = 30_000
    rows = [
        Placed(Slice(f"model/{number}", "float32", (count,), (0, count)), 4 * count * number)
        for number in range(COUNT // count)
    ]
    trees: dict[str, Any] = {"model": {str(n): {"$": "tensor", "name": f"model/{n}"} for n in range(len(rows))}}
    reports = run(store, setup(store), [replace(job(attempt), slices=rows, trees=trees)])
    done = [report.done_bytes for report in reports if isinstance(report, SaveProgress)]
    assert done[-1] == len(RAW)
    assert len(done) <= 2 + len(RAW) // CHUNK_BYTES


def test_rank_zero_commits_when_the_last_receipt_is_there(store: Store, attempt: NewAttempt) -> None:
    def rank(number: int) -> Report:
        return run(store, setup(store, number, 2), [job(attempt, rows=number == 0)])[-1]

    with ThreadPoolExecutor(2) as ranks:
        first, second = ranks.map(rank, range(2))
    assert isinstance(first, Done)
    assert isinstance(second, Done)
    assert first.outcome == second.outcome
    assert StoreSource(store).latest("r").world_size == 2


def test_a_missing_rank_is_named_and_nothing_is_committed(store: Store, attempt: NewAttempt) -> None:
    reports = run(store, setup(store, 0, 3, timeout=0.2), [job(attempt)])
    failed = reports[-1]
    assert isinstance(reports[-2], Released)  # the slot is free all the same
    assert isinstance(failed, Failed)
    assert failed.code == "save_failed"
    assert "ranks [1, 2] of 3" in failed.message
    assert StoreSource(store).checkpoints("r") == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_complete_save_is_committed_while_an_earlier_one_waits_for_a_rank(store: Store, rank: int) -> None:
    """It is uploaded and committed first, and stays what saves are compared with: it is never what was undecided."""
    first, second, third = map(new_attempt, (7, 8, 9))
    where, reports = Run(store, "r"), list[Report]()
    pipeline = SavePipeline(store, setup(store, rank, 2, timeout=3600.0), reports.append)

    def complete(attempt: NewAttempt) -> None:
        write_rank(store, "r", stored(attempt), {}, rank=1 - rank, world_size=2)
        if rank:
            assert roll_forward(where, stored(attempt)) is not None

    def committed() -> list[int]:
        return [report.number for report in reports if isinstance(report, Done)]

    try:
        pipeline.submit(job(first, 1), RAW)
        pipeline.submit(job(second, 2), RAW)
        wait_until(lambda: receipt_ranks(where, stored(second)) == {rank})
        complete(second)
        wait_until(lambda: committed() == [2])
        assert read_outcome(where, stored(first)) is None
        complete(first)
        wait_until(lambda: committed() == [2, 1])
        pipeline.submit(job(third, 3), RAW)
        wait_until(lambda: receipt_ranks(where, stored(third)) == {rank})
        complete(third)
        wait_until(lambda: committed() == [2, 1, 3])
    finally:
        pipeline.finish_uploads()
        for attempt in undecided_attempts(where):  # whatever failed, nothing waits any more
            write_rank(store, "r", attempt, {}, rank=1 - rank, world_size=2)
            roll_forward(where, attempt)
        pipeline.close()
    assert StoreSource(store).latest("r").step == 9
    receipts = [read_receipt(where, stored(one), rank) for one in (first, second, third)]
    assert [referenced_attempts(receipt.content) for receipt in receipts] == [[], [], [stored(second)]]


def test_a_failed_upload_leaves_no_shard_and_the_next_one_works(tmp_path: Path, attempt: NewAttempt) -> None:
    folder = tmp_path / "store"
    store = open_store(str(folder))
    blocked = folder / RunKeys("r").attempts / str(stored(attempt))
    blocked.parent.mkdir(parents=True)
    blocked.write_text("a file where the attempt's folder should be")
    later = new_attempt(8)
    lease = take_lease(Run(store, "r"), Attempt(6, new_ulid(system_clock())), "a restore", 3600)
    reports = run(store, setup(store), [replace(job(attempt, 1), lease=lease), job(later, 2)])
    failed = next(report for report in reports if isinstance(report, Failed))
    assert failed.number == 1
    assert str(stored(attempt)) in failed.message
    assert StoreSource(store).latest("r").step == 8
    assert active_leases(Run(store, "r")) == {}, "the commit after it does what this one was to do"


@pytest.mark.parametrize("mode", ["before", "after"])
def test_any_one_lost_request_fails_no_save(
    tmp_path: Path, mode: Literal["before", "after"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shard is written again from its slot, and a create whose reply was lost is recognized."""
    monkeypatch.setattr("ckptstore.retry._FIRST_PAUSE_S", 0.001)
    raw = np.arange(1 << 16, dtype=np.float32).data.cast("B")

    def save(number: int, fail_at: int) -> tuple[list[Report], Faults]:
        folder = open_store(str(tmp_path / f"{number}"))
        reports, faults = list[Report](), Faults(fail_at, mode)
        patient = replace(setup(folder), retry_s=60.0)
        pipeline = SavePipeline(FaultyStore(folder, faults), patient, reports.append)
        small = new_job(new_attempt(7), 1 << 16)
        pipeline.submit(small, raw)
        pipeline.close()
        assert isinstance(reports[-1], Done), (fail_at, faults.calls, reports[-1])
        source = StoreSource(folder)
        assert verify(source, source.latest("r")).ok, (fail_at, faults.calls)
        return reports, faults

    _, faults = save(0, -1)
    assert any(call.startswith("commit") for call in faults.calls)
    for fail_at in range(len(faults.calls)):
        reports, _ = save(fail_at + 1, fail_at)
    assert next(report for report in reports if isinstance(report, Released)).retries <= 1


def test_a_save_waits_for_a_store_that_is_away_and_not_longer_than_its_limit(tmp_path: Path) -> None:
    folder, away = tmp_path / "store", tmp_path / "away"
    store = open_store(str(folder))
    assert isinstance(run(store, setup(store), [job(new_attempt(7))])[-1], Done)
    folder.rename(away)
    failed = run(store, replace(setup(store), retry_s=0.2), [job(new_attempt(8))])[-1]
    assert isinstance(failed, Failed)
    assert (failed.code, "there is no folder" in failed.message) == ("store_unavailable", True)
    back = threading.Timer(0.5, away.rename, [folder])
    back.start()
    released, done = run(store, replace(setup(store), retry_s=60.0), [job(new_attempt(9))])[-2:]
    back.join()
    assert isinstance(done, Done)
    assert isinstance(released, Released)
    assert released.retries
