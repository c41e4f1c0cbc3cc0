"""The simulation of many ranks: what it counts is what the protocol needs."""

from __future__ import annotations

from bench import scale
from ckptstore.format.parsing import parse_manifest

RANKS = 8


def test_requests_of_eight_ranks() -> None:
    one = scale.Save(RANKS)
    with scale.in_virtual_time(one.clock):
        one.write()
        outcome = one.commit()
        committed_at = one.clock.now
        known_at = one.learn()
    assert one.durable_at < committed_at < known_at
    others, leader = one.elsewhere.count, one.at_rank_0.count
    assert others["PUT"] == RANKS - 1  # receipts
    assert leader["PUT"] == 1 + 2  # manifest and outcome as well
    assert others["LIST"] == 0
    assert others["GET"] >= RANKS - 1  # the outcome, until it is there
    looks = leader["LIST"] - 1  # one listing of the dead, after the outcome
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
