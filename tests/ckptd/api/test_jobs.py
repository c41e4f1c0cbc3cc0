from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptapi import bodies
from ckptapi.bodies import EventKind, JobBody, JobState
from ckptapi.client import DaemonClient
from ckptd.index import Database, JobIndex
from ckptstore import names
from ckptstore.clock import system_clock
from ckptstore.commits.catalog import State
from ckptstore.errors import CkptError, NoCheckpoint, NotFound
from ckptstore.names import Attempt, RunKeys, new_ulid
from ckptstore.stores import Store, open_store
from tests.support.checkpoints import flipped, sample_arrays, write_checkpoint, write_rank
from tests.support.daemons import Daemon, running_daemon
from tests.support.waiting import wait_until

ULID = "01M7Y6P7WGCXV53EY39EPJ6JT8"


@pytest.fixture
def daemon(store: Store) -> Iterator[Daemon]:
    """Over checkpoints of the steps 1, 2 and 3."""
    for step in (1, 2, 3):
        write_checkpoint(store, "gpt", step)
    with running_daemon(store.url) as daemon:
        yield daemon


def done(client: DaemonClient, request: bodies.JobRequest) -> bodies.JobBody:
    job = client.start_job(request)
    wait_until(lambda: not client.job(job.id).state.live, f"the end of job {job.id}")
    return client.job(job.id)


def test_verify_finds_the_flipped_byte_and_the_checkpoint_is_corrupt(store: Store, client: DaemonClient) -> None:
    good = done(client, bodies.VerifyJob(run="gpt"))
    assert (good.state, good.result) == (JobState.SUCCEEDED, {"checked": 3, "corrupt": [], "num_corrupt": 0})
    assert good.done == good.total > 0
    assert good.log is not None
    assert good.log.count(" ok\n") == 3
    newest = client.latest("gpt")
    key = RunKeys("gpt").shard(newest.attempt, names.shard_name(0))
    store.put(key, flipped(store.get(key), 1000))
    bad = done(client, bodies.VerifyJob(checkpoint=newest.id))
    assert bad.result is not None
    assert (bad.result["corrupt"], client.latest("gpt").step) == ([newest.id], 2)
    kinds = [(event.kind, event.checkpoint) for event in client.events(limit=500).items]
    assert (EventKind.CORRUPT, newest.id) in kinds
    assert kinds.count((EventKind.JOB_ENDED, None)) == 2
    assert [job.id for job in client.jobs()] == [bad.id, good.id]
    assert client.jobs()[0].log is None


def test_jobs_on_an_engine_find_and_heal_what_jobs_in_the_daemon_do(store: Store) -> None:
    arrays = sample_arrays()
    base = write_checkpoint(store, "gpt", 1, arrays)
    copy = write_checkpoint(store, "gpt", 2, arrays)  # holds the same bytes again
    key = RunKeys("gpt").shard(base.attempt, names.shard_name(0))
    store.put(key, flipped(store.get(key), 1000))
    with running_daemon(store.url, options=("--jobs-on", "local:2")) as daemon, daemon.client() as client:
        found = done(client, bodies.VerifyJob(run="gpt"))
        assert found.result == {"checked": 2, "corrupt": [base.id], "num_corrupt": 1}
        assert found.done == found.total == base.needed_bytes + copy.needed_bytes
        healed = done(client, bodies.HealJob(run="gpt"))
        assert healed.result == {"checked": 2, "corrupt": [], "num_corrupt": 0, "healed": [key], "num_healed": 1}
        assert {c.state for c in client.checkpoints("gpt")} == {State.COMMITTED}


def test_gc_leaves_fresh_uploads_alone(store: Store, client: DaemonClient) -> None:
    write_rank(store, "gpt", Attempt(4, new_ulid(system_clock() - 7 * 86_400)), sample_arrays(), 0, world_size=2)
    collected = done(client, bodies.CollectJob(run="gpt"))
    assert collected.state is JobState.SUCCEEDED, collected
    untouched = {"run": "gpt", "swept": [], "rolled_forward": [], "aborted": [], "freed_bytes": 0}
    assert collected.result == {"runs": [untouched], "freed_bytes": 0}
    assert len(client.checkpoints("gpt")) == 3


def test_impossible_jobs_are_refused(client: DaemonClient) -> None:
    for request, error in (
        (bodies.VerifyJob(run="nope"), NoCheckpoint),
        (bodies.VerifyJob(checkpoint="gpt@77"), NoCheckpoint),
        (bodies.CollectJob(run="nope"), NoCheckpoint),
    ):
        failed = done(client, request)
        assert (failed.state, failed.code) == (JobState.FAILED, error.code)
        assert failed.problem
    with pytest.raises(NotFound):
        client.job(ULID)
    with pytest.raises(NotFound):
        client.cancel_job(ULID)
    with pytest.raises(CkptError) as caught:
        client.job("x")
    assert caught.value.code == "invalid_name"


def test_requests_that_are_none(daemon: Daemon) -> None:
    wrong: list[object] = [
        {}, {"kind": "x"}, {"kind": "verify", "run": 1}, {"kind": "verify", "run": "x" * 201}, [], None,
    ]  # fmt: skip
    for body in wrong:
        answer = daemon.post(bodies.JOBS, body)
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request"), body


def test_live_uploads_show_who_is_missing(store: Store, client: DaemonClient) -> None:
    attempt = Attempt(9, new_ulid(system_clock()))
    for rank in (0, 2):
        write_rank(store, "gpt", attempt, sample_arrays() if rank == 0 else {}, rank, world_size=4)
    (upload,) = client.attempts("gpt")
    assert [found.attempt for found in client.attempts()] == [upload.attempt]
    assert (upload.step, upload.num_receipts, upload.world_size, upload.missing_ranks) == (9, 2, 4, [1, 3])
    assert upload.num_shards == 1
    assert upload.stored_bytes > 1_000_000


def test_an_upload_of_an_impossible_world_is_listed(store: Store, daemon: Daemon, client: DaemonClient) -> None:
    """Its receipt is valid but for its world size, which must not become an allocation."""
    hostile = Attempt(9, new_ulid(system_clock()))
    write_rank(store, "gpt", hostile, {}, world_size=2**40)
    complete = Attempt(10, new_ulid(system_clock()))
    write_rank(store, "gpt", complete, {})
    wait_until(lambda: client.latest("gpt").step == 10, "the recovery of the other attempt")
    (upload,) = client.attempts("gpt")
    assert (upload.attempt, upload.num_receipts) == (str(hostile), 1)
    assert (upload.world_size, upload.missing_ranks, daemon.get("/").status_code) == (None, [], 200)


def test_a_restart_interrupts_what_ran(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    write_checkpoint(store, "gpt", 1)
    db = f"sqlite:///{tmp_path}/index.db"
    database, old = Database(db, 2), system_clock() - 60
    with running_daemon(store.url, db):
        JobIndex(database).add(
            JobBody(id=ULID, kind="verify", request={}, state=JobState.RUNNING, created_at=system_clock())
        )
    JobIndex(database).change(ULID, heartbeat_at=old)
    with running_daemon(store.url, db) as daemon, daemon.client() as client:
        wait_until(lambda: client.job(ULID).state is JobState.INTERRUPTED, "the end of a job without a daemon")
        assert "ended" in client.job(ULID).problem
    database.close()
