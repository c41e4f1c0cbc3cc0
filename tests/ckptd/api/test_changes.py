"""Notify, prune, leases, reindex, over HTTP."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ckptapi import bodies
from ckptapi.client import DaemonClient
from ckptstore.clock import system_clock
from ckptstore.commits.catalog import list_checkpoints
from ckptstore.commits.commit import commit_attempt, decide
from ckptstore.errors import AttemptAborted, InvalidRequest, NoCheckpoint
from ckptstore.format.records import Policy
from ckptstore.names import Attempt, RunKeys, new_ulid
from ckptstore.reading.verify import verify
from ckptstore.retention.deletion import delete_checkpoint
from ckptstore.retention.pruning import Prune
from ckptstore.run import Run
from ckptstore.stores import Store
from tests.support.checkpoints import sample_arrays, write_checkpoint, write_rank
from tests.support.daemons import Daemon, running_daemon
from tests.support.waiting import wait_until

# It polls once, at its start: later changes come by notification.
_NEVER_POLLS = ("--poll-seconds", "3600")


@pytest.fixture
def daemon(store: Store) -> Iterator[Daemon]:
    with running_daemon(store.url, options=_NEVER_POLLS) as daemon:
        yield daemon


@pytest.fixture
def client(daemon: Daemon) -> Iterator[DaemonClient]:
    with daemon.client() as client:
        yield client


def _steps(store: Store, run: str = "gpt") -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(Run(store, run))]


def test_a_notified_commit_is_latest_at_once(store: Store, client: DaemonClient) -> None:
    checkpoint = write_checkpoint(store, step=7)
    client.notify("gpt", checkpoint.attempt)
    assert client.latest("gpt") == checkpoint
    client.notify("gpt", checkpoint.attempt)
    assert client.checkpoints("gpt") == [checkpoint]


def test_a_notification_is_not_believed(store: Store, daemon: Daemon, client: DaemonClient) -> None:
    attempt = Attempt(5, new_ulid(system_clock()))
    with pytest.raises(NoCheckpoint):
        client.notify("gpt", attempt)
    receipt = write_rank(store, "gpt", attempt, sample_arrays())
    with pytest.raises(NoCheckpoint):
        client.notify("gpt", attempt)
    assert daemon.get("/checkpoints/latest?run=gpt").status_code == 404
    commit_attempt(Run(store, "gpt"), [receipt])
    client.notify("gpt", attempt)
    assert client.latest("gpt").attempt == attempt


def test_an_aborted_attempt_is_410(store: Store, daemon: Daemon, client: DaemonClient) -> None:
    attempt = Attempt(5, new_ulid(system_clock()))
    decide(Run(store, "gpt"), attempt, None)
    with pytest.raises(AttemptAborted):
        client.notify("gpt", attempt)
    answer = daemon.post(bodies.NOTIFY, {"run": "gpt", "attempt": str(attempt)})
    assert (answer.status_code, answer.json()["code"]) == (410, "attempt_aborted")


def test_a_deleted_checkpoint_is_not_indexed_again(store: Store, client: DaemonClient) -> None:
    checkpoint = write_checkpoint(store, step=7)
    delete_checkpoint(Run(store, checkpoint.run), checkpoint.attempt, "test", force=True)
    with pytest.raises(NoCheckpoint):
        client.notify("gpt", checkpoint.attempt)
    half_deleted = write_checkpoint(store, step=8)
    store.put(RunKeys("gpt").tombstone(half_deleted.attempt, new_ulid(0)), b"the deleter died here")
    with pytest.raises(NoCheckpoint):
        client.notify("gpt", half_deleted.attempt)


def test_a_dry_run_deletes_nothing_and_is_the_default(store: Store, daemon: Daemon) -> None:
    for step in range(4):
        write_checkpoint(store, step=step)
    answer = daemon.post(bodies.PRUNE, {"keep_last": 1}).json()
    assert answer["dry_run"] is True
    assert [item["reasons"] for item in answer["items"]] == [["last-1"], [], [], []]
    removed = [item["checkpoint"]["stored_bytes"] for item in answer["items"] if not item["reasons"]]
    assert answer["freed_bytes"] == sum(removed) > 0
    assert _steps(store) == [3, 2, 1, 0]


def test_a_prune_works_from_the_store_and_updates_the_index(store: Store, daemon: Daemon, client: DaemonClient) -> None:
    for step in range(4):
        write_checkpoint(store, step=step)  # the index has seen none of them
    write_checkpoint(store, "bert", 1)
    pruned = client.prune(Prune(Policy(2), "gpt"))
    assert not pruned.held
    assert _steps(store) == [3, 2]
    assert [c.step for c in client.checkpoints("gpt")] == [3, 2]
    client.prune(Prune(Policy(1)))
    assert (_steps(store), _steps(store, "bert")) == ([3], [1])
    assert "ckptd_prune_deleted_total 3.0" in daemon.get("/metrics").text


def test_prunes_that_make_no_sense(daemon: Daemon, client: DaemonClient) -> None:
    rules: list[dict[str, object]] = [{"keep_last": 0}, {"rules": {}}, {"rules": {"keep_best": ["loss"]}}]
    for keeps_nothing in rules:
        answer = daemon.post(bodies.PRUNE, {**keeps_nothing, "dry_run": False})
        assert (answer.status_code, answer.json()["code"]) == (422, InvalidRequest.code)
    with pytest.raises(NoCheckpoint):
        client.plan_prune(Prune(Policy(1), "no-such-run"))


def test_a_lease_keeps_a_checkpoint_from_a_prune(store: Store, client: DaemonClient) -> None:
    old = write_checkpoint(store, step=1)
    write_checkpoint(store, step=2)
    client.reindex()
    lease = client.take_lease(old, "rank-0@host", 60)
    pruned = client.prune(Prune(Policy(1), "gpt"))
    assert [decision.reasons for decision in pruned.decisions] == [("last-1",), ("lease:rank-0@host",)]
    assert verify(client, old).ok
    client.release_lease("gpt", lease)
    client.release_lease("gpt", lease)
    client.prune(Prune(Policy(1), "gpt"))
    assert _steps(store) == [2]
    with pytest.raises(NoCheckpoint):
        client.take_lease(old, "rank-0@host", 60)


def test_a_reader_with_a_lease_finishes_although_its_checkpoint_was_hidden(store: Store, client: DaemonClient) -> None:
    old = write_checkpoint(store, step=1)
    client.reindex()
    client.take_lease(old, "reader", 60)
    store.put(RunKeys("gpt").tombstone(old.attempt, new_ulid(0)), b"a deletion that came in between")
    client.reindex()
    assert client.checkpoints("gpt") == []
    assert verify(client, old).ok


def test_reindex_reads_everything_again(store: Store, client: DaemonClient) -> None:
    checkpoint = write_checkpoint(store, step=1)
    write_checkpoint(store, "bert", 2)
    found = client.reindex()
    assert (found.runs, found.checkpoints) == (2, 2)
    store.put(RunKeys("gpt").outcome(checkpoint.attempt), b"flipped")
    client.reindex()
    assert client.checkpoints("gpt")[0].state.value == "corrupt"


def test_a_run_without_a_checkpoint_is_a_run(store: Store, client: DaemonClient) -> None:
    write_rank(store, "young", Attempt(1, new_ulid(system_clock())), {}, world_size=2)
    client.reindex()
    (summary,) = client.run_summaries()
    assert (summary.run, summary.num_checkpoints, summary.latest) == ("young", 0, None)


def test_metrics_name_the_newest_checkpoint(store: Store, daemon: Daemon, client: DaemonClient) -> None:
    client.notify("gpt", write_checkpoint(store, step=40).attempt)
    text = daemon.get("/metrics").text
    assert 'ckptd_last_committed_step{run="gpt"} 40.0' in text
    age = next(line for line in text.splitlines() if line.startswith('ckptd_checkpoint_age_seconds{run="gpt"}'))
    assert 0 <= float(age.split()[-1]) < 60
    assert "ckptd_index_lag_seconds " in text
    wait_until(lambda: 'route="/metrics",status="200"' in daemon.get("/metrics").text, "counting a request")
