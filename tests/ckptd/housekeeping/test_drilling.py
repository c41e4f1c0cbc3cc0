"""The daemon drills the restore of the newest checkpoint of each run."""

from __future__ import annotations

import re

from ckptapi.bodies import DrillJob
from ckptstore.commits.catalog import Checkpoint, latest
from ckptstore.retention.drilling import last_drill
from ckptstore.retention.scrubbing import verified_at
from ckptstore.run import Run
from ckptstore.stores import Store
from tests.support.checkpoints import write_checkpoint
from tests.support.daemons import running_daemon
from tests.support.waiting import wait_until

_OPTIONS = ("--poll-seconds", "0.2", "--drill-hours", "24", "--drill-ranks", "8, 512", "--scrub-days", "30")


def _flip(store: Store, checkpoint: Checkpoint) -> None:
    key = Run(store, checkpoint.run).keys.shard(checkpoint.attempt, "shard-00000.ckpt")
    data = store.get(key)
    store.put(key, bytes([data[0] ^ 1]) + data[1:])


def test_the_newest_checkpoint_is_drilled_and_one_read_serves_the_scrub(store: Store) -> None:
    first = write_checkpoint(store, step=1)
    newest = write_checkpoint(store, step=2)
    with running_daemon(store.url, options=_OPTIONS) as daemon, daemon.client() as client:
        wait_until(lambda: "ckptd_scrubbed_total 1.0" in daemon.get("/metrics").text, "the drill, then the scrub")
        metrics = daemon.get("/metrics").text
        assert "ckptd_drills_total 1.0" in metrics
        assert "ckptd_drills_failed_total 0.0" in metrics
        for ranks in (1, 8, 512):
            assert f'ckptd_drill_restore_seconds{{ranks="{ranks}",run="gpt"}}' in metrics
        assert 'ckptd_last_drill_timestamp_seconds{run="gpt"}' in metrics
        found = client.last_drill("gpt")
        assert (found.id, found.ok) == (newest.id, True)
        assert [layout.ranks for layout in found.layouts] == [1, 8, 512]
        (read,) = re.findall(r"^ckptd_scrubbed_bytes_total (.*)$", metrics, re.MULTILINE)
        assert float(read) == first.stored_bytes + newest.stored_bytes, "each is read once"
    assert set(verified_at(Run(store, "gpt"))) == {first.attempt, newest.attempt}


def test_a_damaged_newest_checkpoint_fails_and_the_one_before_it_is_drilled(store: Store) -> None:
    before = write_checkpoint(store, step=1)
    damaged = write_checkpoint(store, step=2)
    _flip(store, damaged)
    with running_daemon(store.url, options=_OPTIONS[:-2]) as daemon, daemon.client() as client:
        wait_until(lambda: "ckptd_drills_total 2.0" in daemon.get("/metrics").text, "both drills")
        assert "ckptd_drills_failed_total 1.0" in daemon.get("/metrics").text
        wait_until(lambda: client.latest("gpt").step == 1, "the index")
        assert client.last_drill("gpt").id == before.id
    assert latest(Run(store, "gpt")).step == 1


def test_a_job_drills_without_the_setting(store: Store) -> None:
    damaged = write_checkpoint(store, step=2)
    whole = write_checkpoint(store, "other", step=3)
    _flip(store, damaged)
    with running_daemon(store.url) as daemon, daemon.client() as client:
        job = client.run_job(DrillJob(ranks=[4]))
        assert job.result is not None
        assert (job.result["num_drilled"], job.result["num_failed"]) == (2, 1)
        by_id = {drilled["id"]: drilled for drilled in job.result["drills"]}
        assert by_id[whole.id]["ok"]
        assert by_id[damaged.id]["problems"] == [
            f"chunk 0 of shard-00000.ckpt of {damaged.id} does not match its checksum"
        ]
        assert job.done == job.total
    found = last_drill(Run(store, "gpt"))
    assert found is not None
    assert found.attempt == str(damaged.attempt)
