"""Restores from a local disk whose files the page cache has dropped, against a bare read of the same bytes.

The limit is the fastest of a few bare reads: direct I/O with one or eight concurrent requests, and one or two at a time
through the page cache after it has dropped the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from bench.durable_disk import RAW
from bench.measuring import Usage, forget_cached, raw_read_s, touch_free_memory, touched
from bench.report import Goal, Report
from bench.restore import RIVAL, bare, restores
from bench.state import trained, wanted_bytes

LIMIT_GOAL = 0.85
THROUGH, THROUGH_TWO = "bare read", "bare read, 2 at a time"
PAST, PAST_MANY = "bare read, O_DIRECT", "bare read, O_DIRECT, 8 at a time"


def measure(quick: bool) -> Report:
    """In a folder of the default temporary file system."""
    state = trained("fp32", wanted_bytes(quick))

    def limits(shard: Path) -> Mapping[str, Callable[[], Usage]]:
        into = touched(shard.stat().st_size)  # more than the state

        def through(threads: int) -> Usage:
            forget_cached(shard.parent)
            touch_free_memory(len(into))
            return bare(partial(raw_read_s, shard, into, threads, cached=True))

        return {
            THROUGH: partial(through, 1),
            THROUGH_TWO: partial(through, 2),
            PAST: partial(bare, partial(raw_read_s, shard, into, 1)),
            PAST_MANY: partial(bare, partial(raw_read_s, shard, into, 8)),
        }

    done = restores(state, limits, cold=True)
    limit, ours = min(map(done.seconds, (THROUGH, THROUGH_TWO, PAST, PAST_MANY))), done.seconds(RAW)
    goals = [
        Goal("bare read", RAW, limit / ours, LIMIT_GOAL, "at least"),
        Goal(RIVAL, RAW, done.best_peer() / ours, 1.0, "at least"),
    ]
    return done.report("restore-cold", "not in the page cache", limit, goals)
