from __future__ import annotations

import pytest

from ckptapi import bodies
from ckptapi.client import DaemonClient
from ckptstore.clock import system_clock
from ckptstore.commits.commit import commit_attempt, decide
from ckptstore.errors import AttemptAborted, NoCheckpoint
from ckptstore.names import Attempt, RunKeys, new_ulid
from ckptstore.retention.deletion import delete_checkpoint
from ckptstore.run import Run
from ckptstore.stores import Store
from tests.support.checkpoints import sample_arrays, write_checkpoint, write_rank
from tests.support.daemons import Daemon


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
