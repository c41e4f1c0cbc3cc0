from __future__ import annotations

import re

import pytest

from ckptapi.bodies import VerifyJob
from ckptstore.commits.catalog import Checkpoint, latest
from ckptstore.retention.scrubbing import verified_at
from ckptstore.run import Run
from ckptstore.stores import Store
from tests.support.checkpoints import flipped, write_checkpoint
from tests.support.daemons import running_daemon
from tests.support.waiting import wait_until

_OPTIONS = ("--poll-seconds", "0.2", "--verify-hours", "24", "--verify-ranks", "8, 512", "--scrub-days", "30")


def _flip(store: Store, checkpoint: Checkpoint) -> None:
    key = Run(store, checkpoint.run).keys.shard(checkpoint.attempt, "shard-00000.ckpt")
    store.put(key, flipped(store.get(key), 0))


def test_the_newest_checkpoint_comes_first_and_each_is_read_once(store: Store) -> None:
    first, newest = write_checkpoint(store, step=1), write_checkpoint(store, step=2)
    with running_daemon(store.url, options=_OPTIONS) as daemon:
        wait_until(lambda: "ckptd_scrubbed_total 2.0" in daemon.get("/metrics").text, "both")
        metrics = daemon.get("/metrics").text
        (read,) = re.findall(r"^ckptd_scrubbed_bytes_total (.*)$", metrics, re.MULTILINE)
        assert float(read) == first.stored_bytes + newest.stored_bytes
        restores = re.findall(r"gpt@(\d)\S* restores on (\d+) ranks", daemon.log())
    assert restores == [("2", "1"), ("2", "8"), ("2", "512")]
    assert set(verified_at(Run(store, "gpt"))) == {first.attempt, newest.attempt}


@pytest.mark.parametrize("options", [_OPTIONS[:-2], (*_OPTIONS[:2], "--scrub-days", "1")], ids=["verify", "scrub"])
def test_a_damaged_newest_checkpoint_is_out_of_latest(store: Store, options: tuple[str, ...]) -> None:
    before, damaged = write_checkpoint(store, step=1), write_checkpoint(store, step=2)
    _flip(store, damaged)
    with running_daemon(store.url, options=options) as daemon, daemon.client() as client:
        wait_until(lambda: "ckptd_scrubbed_total 2.0" in daemon.get("/metrics").text, "both")
        assert "ckptd_scrub_corrupt_total 1.0" in daemon.get("/metrics").text
        wait_until(lambda: client.latest("gpt").step == 1, "the index")
    assert (latest(Run(store, "gpt")).step, set(verified_at(Run(store, "gpt")))) == (1, {before.attempt})


def test_a_job_verifies_that_checkpoints_restore(store: Store) -> None:
    damaged = write_checkpoint(store, step=2)
    whole = write_checkpoint(store, "other", step=3)
    _flip(store, damaged)
    with running_daemon(store.url) as daemon, daemon.client() as client:
        job = client.run_job(VerifyJob(ranks=[4]))
        assert job.result is not None
        assert (job.result["checked"], job.result["corrupt"]) == (2, [damaged.id])
        assert {id: [one["ranks"] for one in found] for id, found in job.result["estimates"].items()} == {
            whole.id: [1, 4]
        }
        assert job.done == job.total
