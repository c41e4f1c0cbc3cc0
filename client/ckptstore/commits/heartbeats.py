"""Heartbeats: the documents in which each trainer of a run records that it trains. The saver writes them."""

from __future__ import annotations

from functools import partial

from ckptstore.format.records import Heartbeat
from ckptstore.run import Run
from ckptstore.threads import in_parallel

KEPT_S = 365 * 24 * 3600.0
MOST = 1000
"""Heartbeats of a run that are kept, the newest ones."""


def read_heartbeats(run: Run) -> list[Heartbeat]:
    """All heartbeats of a run, oldest first; damaged ones are left out. Raises UnsupportedFormat or Unavailable."""
    read = partial(run.read_intact, kind=Heartbeat)
    found = in_parallel(read, sorted(_listed(run)))
    return [heartbeat for heartbeat in found if heartbeat is not None and heartbeat.run == run.name]


def old_heartbeats(run: Run) -> list[str]:
    """The keys of heartbeats that may be deleted: older than a year, or more than MOST."""
    listed = sorted(_listed(run).items(), key=lambda item: item[1])
    surplus = len(listed) - MOST
    return [key for number, (key, at) in enumerate(listed) if number < surplus or run.age_s(at) > KEPT_S]


def _listed(run: Run) -> dict[str, float]:
    """When the heartbeats were written, by key."""
    return {info.key: info.modified_at for _, info in run.listed_by_ulid(run.keys.heartbeats)}
