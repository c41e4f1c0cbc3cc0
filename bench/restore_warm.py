"""Restores from files that are in the page cache, checked, against one libc memcpy of the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from bench.durable_disk import RAW
from bench.measuring import Usage, memcpy_s, touched
from bench.report import Goal, Report
from bench.restore import RIVAL, bare, restores
from bench.state import trained, wanted_bytes

MEMCPY_GOAL, DCP_GOAL = 1.5, 5.0
MEMCPY = "memcpy"


def measure(quick: bool) -> Report:
    """In a folder of the default temporary file system."""
    state = trained("fp32", wanted_bytes(quick))
    into, source = touched(state.num_bytes), touched(state.num_bytes)

    def limits(shard: Path) -> Mapping[str, Callable[[], Usage]]:
        return {MEMCPY: partial(bare, partial(memcpy_s, state.num_bytes, into, source))}

    done = restores(state, limits, cold=False)
    limit, ours = done.seconds(MEMCPY), done.seconds(RAW)
    goals = [
        Goal(RAW, "memcpy", ours / limit, MEMCPY_GOAL, "at most"),
        Goal(RIVAL, RAW, done.best_peer() / ours, 1.0, "at least"),
        Goal("dcp", RAW, done.seconds("dcp") / ours, DCP_GOAL, "at least"),
    ]
    return done.report("restore-warm", "in the page cache", limit, goals)
