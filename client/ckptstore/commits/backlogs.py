"""Backlogs: what the far store, and so the daemon, knows about checkpoints that are only in near stores.

Each near store has one report per run in the far one, under its id. The carrier at work there writes it again
(ckpt.saver.reporting). It is information only: what is to be carried is decided by the pins of the near store
(ckptstore.tiers.carrying).

A report is as old as the last moment at which a carrier worked and the far store answered. While that is away no
reader can know more, so all show the age beside the count.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ckptstore import names
from ckptstore.errors import Damaged, InvalidName, ObjectMissing
from ckptstore.format.parsing import parse_sealed, seal
from ckptstore.format.records import BacklogReport, origin_of
from ckptstore.names import Attempt
from ckptstore.run import Run

REPORT_S = 60.0
"""A carrier with a backlog reports at least this often while the far store answers."""
KEPT_S = 30 * 24 * 3600.0
"""Then a report is collected. Until then the near store may come back with its host."""


class NearBacklog(msgspec.Struct, frozen=True, kw_only=True):
    """The backlog of a run in one near store, as last reported."""

    near: str
    """The id of the near store."""
    url: str
    """Its URL on `origin`'s host."""
    origin: str
    """Who ran the carrier, on which host and in which job; empty if that is not known."""
    checkpoints: int
    bytes: int
    """Stored bytes, of references too."""
    since: float
    """When the oldest one was committed near."""
    oldest: str
    """The id of the oldest one."""
    reported_at: float
    problem: str
    """Why the last try to carry one failed; empty if it did not."""


class RunBacklog(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoints of a run that are to be carried to the far store, over all near stores that have any."""

    checkpoints: int
    bytes: int
    since: float | None
    """When the oldest one was committed near; null: there is none."""
    reported_at: float
    """The time of the oldest report that counts, or of the newest one if no near store has a backlog."""
    stores: list[NearBacklog]
    """Those with a backlog, the oldest first."""


def write_report(far: Run, report: BacklogReport) -> None:
    """Replace the report of a near store; durable on return. Raises Unavailable."""
    far.store.put(far.keys.backlog(report.near), seal(report))


def read_report(far: Run, near: str) -> BacklogReport | None:
    """The report of a near store; None if there is none that can be read. Raises InvalidName or Unavailable."""
    key = far.keys.backlog(near)
    try:
        found = parse_sealed(far.store.get(key), BacklogReport, far.store.object_url(key))
        if found.oldest is not None:
            Attempt.parse(found.oldest)
    except (Damaged, InvalidName, ObjectMissing):
        return None
    empty = found.since is None and found.oldest is None and not found.checkpoints and not found.bytes
    whole = found.since is not None and found.oldest is not None and found.checkpoints > 0 and found.bytes >= 0
    return found if (found.run, found.near) == (far.name, near) and (empty or whole) else None


def read_backlog(run: Run) -> RunBacklog | None:
    """What is only near of a run; None if no near store has ever reported. Raises Unavailable."""
    listed = (info.key.rsplit("/", 1)[-1].removesuffix(".json") for info in run.store.list(run.keys.backlogs))
    found = (read_report(run, near) for near in listed if names.is_ulid(near))
    return total(report for report in found if report is not None)


def total(reports: Iterable[BacklogReport]) -> RunBacklog | None:
    """The sum of the reports of all near stores of a run; None if there are none. Pure."""
    listed = list(reports)
    stores = [
        NearBacklog(
            near=one.near, url=one.url, origin=str(origin_of(one) or ""), checkpoints=one.checkpoints, bytes=one.bytes,
            since=one.since, oldest=names.checkpoint_id(one.run, Attempt.parse(one.oldest)), reported_at=one.at,
            problem=one.problem,
        )
        for one in listed
        if one.since is not None and one.oldest is not None
    ]  # fmt: skip
    if not listed:
        return None
    return RunBacklog(
        checkpoints=sum(one.checkpoints for one in stores),
        bytes=sum(one.bytes for one in stores),
        since=min((one.since for one in stores), default=None),
        reported_at=min(one.reported_at for one in stores) if stores else max(one.at for one in listed),
        stores=sorted(stores, key=lambda one: one.since),
    )


def old_reports(run: Run) -> list[str]:
    """The keys of reports that may be deleted: nothing has been reported from their near store for a month."""
    return [info.key for info in run.store.list(run.keys.backlogs) if run.age_s(info.modified_at) > KEPT_S]
