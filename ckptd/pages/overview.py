"""The view of the list of runs: which ones, in which order, and how each of them goes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from statistics import median

from ckptd.index import RunSummary
from ckptd.pages.curves import main_metric, value_of
from ckptd.pages.queries import RunOrder
from ckptstore import human
from ckptstore.charts import Spark, sparkline
from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.commits.goodput import Account, EndOf
from ckptstore.format.records import NearOnly

_GAPS = 12
_SLACK_S = 60.0
_LONGEST_S = 24 * 3600.0
"""If it is not known whether the trainer has ended, a run is not called stalled after this time."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How a run goes, and where."""

    stalled: str
    """Why it is called stalled: its trainer has not ended, and the next commit is overdue. Empty if it is not."""
    ended: str
    """How its trainer ended, if that is known."""
    origin: str
    """Who runs it, on which host and in which job; empty if that is not known."""


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run in the list."""

    summary: RunSummary
    age_s: float | None
    """Age of its newest checkpoint; None if it has none."""
    trend: Spark | None
    trend_of: str
    num_uploads: int | None
    """None if unknown."""
    num_restores: int
    progress: Progress
    near_only: NearOnly | None
    """None if it has no near store."""

    @property
    def tags(self) -> list[tuple[str, str]]:
        """The tags of its newest checkpoint."""
        return sorted(self.summary.latest.tags.items()) if self.summary.latest else []


def chosen_runs(
    summaries: Sequence[RunSummary], text: str, order: RunOrder, accounts: Mapping[str, Account]
) -> list[RunSummary]:
    """The runs with `text` in their name, their origin, or a tag of their newest checkpoint, in an order."""
    found = [summary for summary in summaries if text.lower() in _searched(summary, accounts.get(summary.run))]
    keys: dict[RunOrder, Callable[[RunSummary], float]] = {
        RunOrder.NEWEST: lambda summary: -summary.latest.committed_at if summary.latest else inf,
        RunOrder.LARGEST: lambda summary: -summary.stored_bytes,
        RunOrder.MOST: lambda summary: -summary.num_checkpoints,
    }
    return sorted(found, key=keys[order]) if order in keys else found


def run_row(
    summary: RunSummary,
    recent: Sequence[Checkpoint],
    num_uploads: int | None,
    num_restores: int,
    account: Account | None,
    now: float,
) -> RunRow:
    """A run with data of its newest checkpoints. recent: newest step first. account: None if it is not known."""
    known = [c for c in reversed(recent) if c.state is State.COMMITTED]
    metric = main_metric(known)
    age_s = max(0.0, now - summary.latest.committed_at) if summary.latest else None
    trend = sparkline(value_of(c, metric) for c in known)
    going = progress(recent, num_uploads, account, now)
    near_only = account.near_only if account is not None else None
    return RunRow(summary, age_s, trend, metric, num_uploads, num_restores, going, near_only)


def progress(recent: Sequence[Checkpoint], num_uploads: int | None, account: Account | None, now: float) -> Progress:
    """How a run goes. recent: its newest checkpoints, newest step first. account: None if it is not known."""
    known = [c for c in reversed(recent) if c.state is State.COMMITTED]
    ended = account.attempts[-1].ended if account is not None else EndOf.RUNNING
    alive = ended in (EndOf.RUNNING, EndOf.VANISHED) and not num_uploads
    stalled = _overdue(known, now, _LONGEST_S if account is None else inf) if alive else ""
    how = "" if account is None else str(ended)
    return Progress(stalled, how, _origin(account))


def _origin(account: Account | None) -> str:
    return str(account.attempts[-1].origin or "") if account is not None else ""


def _searched(summary: RunSummary, account: Account | None) -> str:
    tags = summary.latest.tags.items() if summary.latest else ()
    return "\n".join([summary.run, _origin(account), *(f"{name}={value}" for name, value in tags)]).lower()


def _overdue(commits: Sequence[Checkpoint], now: float, most_s: float) -> str:
    """Why the next commit is overdue: three times the usual gap has passed, but not `most_s`. Empty if it is not.

    commits: oldest first; three at least.
    """
    times = sorted(c.committed_at for c in commits[-_GAPS:])
    if len(times) < 3:
        return ""
    usual = median(after - before for before, after in pairwise(times))
    waited = now - times[-1]
    if not 3 * usual + _SLACK_S < waited < most_s:
        return ""
    return f"no commit for {human.age(waited)}; the usual gap is {human.duration(usual)}"
