"""The simulations of many ranks and of a daemon count the requests that the protocol, the index and retention need."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import scale, scale_daemon
from ckptstore.format.parsing import parse_manifest

RANKS = 8


def test_requests_of_eight_ranks() -> None:
    one = scale.Save(RANKS)
    with scale.in_virtual_time(one.clock):
        one.write()
        outcome, committed_at = one.commit(), one.clock.now
        known_at = one.learn()
    assert one.durable_at < committed_at < known_at
    others, leader = one.elsewhere.count, one.at_rank_0.count
    assert others["PUT"] == RANKS - 1  # receipts
    assert leader["PUT"] == 1 + 2  # manifest and outcome as well
    assert others["LIST"] == 0
    assert others["GET"] >= RANKS - 1  # the outcome, until it is there
    looks = leader["LIST"] - 1  # one listing of the deleted, after the outcome
    assert leader["GET"] == RANKS - 1 + looks - 1  # each receipt once; the outcome after every look but the last
    assert leader["HEAD"] == 1  # the next generation
    assert outcome.committed is not None
    assert outcome.committed.summary.num_shards == RANKS
    assert 0.99e9 < outcome.committed.summary.raw_bytes / RANKS <= 1e9


def test_each_layout_reads_what_was_written() -> None:
    one = scale.Save(RANKS)
    with scale.in_virtual_time(one.clock):
        one.write()
        one.commit()
    content = parse_manifest(one.store.get(one.run.keys.manifest(one.attempt)), "manifest").content
    whole = sum(rows * columns for rows, columns in content.entries.shape)
    for ranks in (4, 16):
        parts = [
            scale.wants_of(content.entries.name, content.entries.shape, rank, ranks, stages=1) for rank in range(ranks)
        ]
        assert sum(want.box[2] * want.box[3] for wants in parts for want in wants if want.box) == whole


EACH_LOOK = 5
"""Listings of a run: outcomes, tombstones, the deleted attempts, quarantine, labels. Generations are the sixth."""


@pytest.mark.parametrize(("size", "per_run"), [(60, 30), (30, 30)])
def test_requests_grow_with_what_is_new(tmp_path: Path, size: int, per_run: int) -> None:
    runs, found = size // per_run, scale_daemon.simulate(tmp_path, size, per_run)
    looks = (EACH_LOOK + 1) * runs
    # A first scan looks twice: at what has changed, then at what to read. Each outcome is read once.
    assert found["first scan requests"] == 1 + 2 * looks + size
    assert found["refresh requests"] <= 1 + 2 * looks
    assert found["refresh after a commit requests"] == 1 + looks + (EACH_LOOK + 1) + 1
    assert found["latest requests"] == found["page of the listing requests"] == 0
    assert found["retention plan of a run requests"] >= per_run + 2, "the store decides, not the index"
    assert found["index bytes"] > 0
