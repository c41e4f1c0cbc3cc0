"""The view of one run with its checkpoints, and why they are kept. Pure, except for `retention_view`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from statistics import median
from typing import NamedTuple
from urllib.parse import quote

from ckptd.index import RunSummary
from ckptd.pages.curves import WRITERS, Curves, main_metric, metric_curves, metric_names, time_curves, value_of
from ckptd.pages.queries import RunOrder, RunPageQuery, paged
from ckptstore import human
from ckptstore.analysis.charts import Line, Point, Tick, sparkline, step_axis
from ckptstore.analysis.goodput import Account, EndOf
from ckptstore.commits.catalog import Checkpoint, State, has_branches
from ckptstore.commits.labels import ARCHIVED
from ckptstore.format.documents import digest
from ckptstore.format.records import LocalOnly, Policy
from ckptstore.names import Attempt
from ckptstore.retention.pins import Holds, active_holds
from ckptstore.retention.policy import KeepDecision, evaluate, policy_for, read_policies
from ckptstore.retention.pruning import PrunePlan
from ckptstore.retention.scrubbing import verified_at
from ckptstore.run import Run


class RunView(NamedTuple):
    """One run."""

    query: RunPageQuery
    num_matching: int
    num_pages: int
    chips: tuple[str, ...]
    """The choices of the plot: the chosen ones, then others."""
    plots_metric: bool
    """Whether the plot shows a metric, not a size or duration."""
    curves: Curves
    over_time: tuple[Curves, ...]
    branches: Branches | None
    """None unless it has more than one generation."""
    rows: Sequence[Checkpoint]
    """The page that is shown."""


def run_view(
    checkpoints: Sequence[Checkpoint],
    query: RunPageQuery,
    now: float,
    others: Mapping[str, Sequence[Checkpoint]] | None = None,
) -> RunView:
    """One run. checkpoints: newest step first. others: of the runs in query.other."""
    metrics = metric_names(checkpoints)
    metric = query.metric if query.metric in metrics else main_metric(checkpoints)
    query = replace(query, metric=metric, also=tuple(name for name in query.also if name in metrics and name != metric))
    matching = [c for c in checkpoints if _matches(c, query)]
    shown, page, num_pages = paged(matching, query.page)
    return RunView(
        query=replace(query, page=page),
        num_matching=len(matching),
        num_pages=num_pages,
        chips=(*query.plotted, *(name for name in metrics if name not in query.plotted)),
        plots_metric=query.metric not in WRITERS,
        curves=metric_curves(matching, query.plotted, others or {}, query.log, query.smooth),
        over_time=time_curves(checkpoints, now),
        branches=branches(checkpoints) if has_branches(checkpoints) else None,
        rows=shown,
    )


def fingerprint(plan: PrunePlan) -> str:
    """A digest of the deletions: equal for the same in any order."""
    return digest("/".join(" ".join(sorted(c.id for c in some)) for some in (plan.remove, plan.thin)).encode())


def _matches(checkpoint: Checkpoint, query: RunPageQuery) -> bool:
    return (
        query.state in (None, checkpoint.state)
        and (query.min_step is None or checkpoint.step >= query.min_step)
        and (query.max_step is None or checkpoint.step <= query.max_step)
    )


_GAPS = 12
_SLACK_S = 60.0


class Progress(NamedTuple):
    """How a run goes, and where."""

    stalled: str
    """Why it is called stalled: its trainer has not ended, and the next commit is overdue. Empty if it is not."""
    ended: str
    """How its trainer ended, if that is known."""
    origin: str
    """Who runs it, on which host and in which job; empty if that is not known."""


class RunRow(NamedTuple):
    """A run in the list."""

    summary: RunSummary
    trend: Line | None
    trend_of: str
    num_uploads: int | None
    """None if unknown."""
    num_restores: int
    progress: Progress
    local_only: LocalOnly | None
    """None if it has no local tier."""


def chosen_runs(
    summaries: Sequence[RunSummary], text: str, order: RunOrder, accounts: Mapping[str, Account]
) -> list[RunSummary]:
    """The runs with `text` in their name, their origin, or a tag of their newest checkpoint, in an order.

    Without text, archived runs are left out, and runs that have ended are one row with their siblings: `sweep/` in
    place of `sweep/a` and `sweep/b`.
    """
    found = [summary for summary in summaries if text.lower() in _searched(summary, accounts.get(summary.run))]
    if not text:
        found = _folded([one for one in found if one.latest is None or ARCHIVED not in one.latest.tags], accounts)
    keys: dict[RunOrder, Callable[[RunSummary], float]] = {
        RunOrder.NEWEST: lambda summary: -summary.latest.committed_at if summary.latest else inf,
        RunOrder.LARGEST: lambda summary: -summary.stored_bytes,
        RunOrder.MOST: lambda summary: -summary.num_checkpoints,
    }
    return sorted(found, key=keys[order]) if order in keys else found


def _folded(summaries: Sequence[RunSummary], accounts: Mapping[str, Account]) -> list[RunSummary]:
    rows = defaultdict[str, list[RunSummary]](list)
    for summary in summaries:
        folder = summary.run[: summary.run.rfind("/") + 1]
        rows[summary.run if not folder or _alive(accounts.get(summary.run)) else folder].append(summary)
    return [found[0] if len(found) == 1 else _sum(folder, found) for folder, found in rows.items()]


def _sum(folder: str, found: Sequence[RunSummary]) -> RunSummary:
    latest = max((s.latest for s in found if s.latest), key=lambda c: c.committed_at, default=None)
    return RunSummary(folder, sum(s.num_checkpoints for s in found), sum(s.stored_bytes for s in found), latest)


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
    trend = sparkline(value_of(c, metric) for c in known)
    going = progress(recent, num_uploads, account, now)
    local_only = account.local_only if account is not None else None
    return RunRow(summary, trend, metric, num_uploads, num_restores, going, local_only)


def progress(recent: Sequence[Checkpoint], num_uploads: int | None, account: Account | None, now: float) -> Progress:
    """How a run goes. recent: its newest checkpoints, newest step first. account: None if it is not known."""
    known = [c for c in reversed(recent) if c.state is State.COMMITTED]
    ended = str(account.attempts[-1].ended) if account is not None else ""
    return Progress(_overdue(known, now) if _alive(account) and not num_uploads else "", ended, _origin(account))


def _alive(account: Account | None) -> bool:
    """Whether its trainer may still run. Without a heartbeat that is not known."""
    last = account.attempts[-1] if account is not None else None
    return last is not None and last.measured and last.ended in (EndOf.RUNNING, EndOf.VANISHED)


def _origin(account: Account | None) -> str:
    if account is None:
        return ""
    last = account.attempts[-1]
    return " · ".join(filter(None, (str(last.origin or ""), last.revision)))


def _searched(summary: RunSummary, account: Account | None) -> str:
    tags = summary.latest.tags.items() if summary.latest else ()
    return "\n".join([summary.run, _origin(account), *(f"{name}={value}" for name, value in tags)]).lower()


def _overdue(commits: Sequence[Checkpoint], now: float) -> str:
    """Why the next commit is overdue: three times the usual gap has passed. Empty if it is not.

    commits: oldest first; three at least.
    """
    times = sorted(c.committed_at for c in commits[-_GAPS:])
    if len(times) < 3:
        return ""
    usual = median(after - before for before, after in pairwise(times))
    waited = now - times[-1]
    if waited <= 3 * usual + _SLACK_S:
        return ""
    return f"no commit for {human.age(waited)}; the usual gap is {human.duration(usual)}"


MOST_ROWS = 24
_MOST_MARKS = 120
_WIDTH, _LEFT, _RIGHT, _ROW, _TOP, _AXIS = 1088, 74, 1072, 26, 18, 26


class Branch(NamedTuple):
    """A generation."""

    number: int
    y: float
    line: str
    """The path of its line."""
    live: bool
    marks: tuple[Point, ...]
    """Its checkpoints; evenly thinned if there are many."""


class Branches(NamedTuple):
    """The newest generations, newest last."""

    width: int
    height: int
    left: int
    right: int
    bottom: int
    rows: tuple[Branch, ...]
    ticks: tuple[Tick, ...]
    num_hidden: int


def branches(checkpoints: Sequence[Checkpoint]) -> Branches:
    """The drawing. checkpoints: of one run."""
    by_generation: dict[int, list[Checkpoint]] = defaultdict(list)
    for checkpoint in checkpoints:
        by_generation[checkpoint.attempt.generation].append(checkpoint)
    shown = sorted(by_generation)[-MOST_ROWS:]
    heights = {number: _TOP + place * _ROW for place, number in enumerate(shown)}
    steps = [c.step for number in shown for c in by_generation[number]]
    across, ticks = step_axis(steps, _LEFT, _RIGHT)
    bottom = _TOP + (len(shown) - 1) * _ROW + 16
    ends = {number: max(c.step for c in by_generation[number]) for number in shown}
    for parent in (by_generation[number][0].parent for number in shown):
        if parent is not None and parent.generation in ends:  # the parent itself may be deleted
            ends[parent.generation] = min(max(steps), max(ends[parent.generation], parent.step))
    rows = []
    for number in shown:
        own, y = sorted(by_generation[number], key=lambda c: c.step), heights[number]
        parent = own[0].parent
        start = across(max(min(steps), parent.step)) if parent is not None else across(own[0].step)
        above = heights.get(parent.generation, y) if parent is not None else y
        end = across(ends[number])
        bend = f"C{start},{y} {start},{y} {min(start + _ROW, end)},{y}" if above != y else ""
        line = f"M{start},{above}{bend}H{end}"
        rows.append(Branch(number, y, line, any(c.live for c in own), _marks(own, across, y)))
    return Branches(_WIDTH, bottom + _AXIS, _LEFT, _RIGHT, bottom, tuple(rows), ticks, len(by_generation) - len(shown))


def _marks(own: Sequence[Checkpoint], across: Callable[[float], float], y: float) -> tuple[Point, ...]:
    kept = own[:: -(-len(own) // _MOST_MARKS)]
    return tuple(
        Point(across(c.step), y, f"step {c.step:,} ({c.branch_state})", c.state, f"/checkpoints/{quote(c.id)}")
        for c in kept
    )


class RetentionView(NamedTuple):
    """Policy, holds and verifications of one run, read from the store."""

    policy: Policy | None
    """The policy in force for the run; None if the run is never pruned."""
    holds: Holds
    verified: Mapping[Attempt, float]
    """When each attempt last passed verification, by the store's clock."""
    now: float
    max_delete_fraction: float

    def blocked(self, run: str, checkpoints: Sequence[Checkpoint]) -> str:
        """Why the policy is not applied: it would delete too many checkpoints of the run. Empty if it is."""
        if self.policy is None:
            return ""
        decisions = tuple(self.evaluate(checkpoints, self.policy))
        return PrunePlan(decisions, (run,), max_delete_fraction=self.max_delete_fraction).blocked

    def evaluate(self, checkpoints: Sequence[Checkpoint], policy: Policy) -> list[KeepDecision]:
        """The decisions that a prune would make about these checkpoints of the run."""
        return evaluate(policy, checkpoints, self.holds, self.now, self.verified)

    def reasons(self, checkpoints: Sequence[Checkpoint]) -> dict[Attempt, tuple[str, ...]]:
        """The reasons to keep each checkpoint; without a policy, its holds."""
        if self.policy is None:
            return {c.attempt: tuple(self.holds.get(c.attempt, ())) for c in checkpoints}
        return {decision.checkpoint.attempt: decision.reasons for decision in self.evaluate(checkpoints, self.policy)}


def retention_view(run: Run) -> RetentionView:
    """The view of one run; takes a few listings. Raises Damaged or Unavailable."""
    policies = read_policies(run.store).policies
    return RetentionView(
        policy=policy_for(policies, run.name),
        holds=active_holds(run),
        verified=verified_at(run),
        now=run.clock(),
        max_delete_fraction=policies.max_delete_fraction,
    )
