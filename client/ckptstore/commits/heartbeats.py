"""Heartbeats: the documents in which each trainer of a run records that it trains. The saver writes them."""

from __future__ import annotations

from ckptstore.errors import Damaged, InvalidName, ObjectMissing
from ckptstore.format.parsing import parse_sealed
from ckptstore.format.records import Heartbeat
from ckptstore.names import Attempt
from ckptstore.run import Run
from ckptstore.threads import in_parallel

KEPT_S = 365 * 24 * 3600.0
MOST = 1000
"""Heartbeats of a run that are kept, the newest ones."""


def read_heartbeats(run: Run) -> list[Heartbeat]:
    """All heartbeats of a run, oldest first; damaged ones are left out. Raises UnsupportedFormat or Unavailable."""

    def read(key: str) -> Heartbeat | None:
        try:
            found = parse_sealed(run.store.get(key), Heartbeat, run.store.object_url(key))
            columns = {len(column) for column in (found.at, found.step, found.stalled_s, found.slowed_s)}
            if found.parent is not None:
                Attempt.parse(found.parent)
        except (Damaged, InvalidName, ObjectMissing):
            return None
        return found if found.run == run.name and len(columns) == 1 else None

    return [found for found in in_parallel(read, sorted(_listed(run))) if found is not None]


def old_heartbeats(run: Run) -> list[str]:
    """The keys of heartbeats that may be deleted: older than a year, or more than MOST."""
    listed = sorted(_listed(run).items(), key=lambda item: item[1])
    surplus = len(listed) - MOST
    return [key for number, (key, at) in enumerate(listed) if number < surplus or run.age_s(at) > KEPT_S]


def _listed(run: Run) -> dict[str, float]:
    """When the heartbeats were written, by key."""
    return {info.key: info.modified_at for _, info in run.listed_by_ulid(run.keys.heartbeats)}
