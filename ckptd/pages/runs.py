"""Views of the list of runs, and of one run with its checkpoints. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf, isfinite
from statistics import median

from ckptd.index import RunSummary
from ckptd.pages.charts import Plot, Point, compact, plot, sparkline
from ckptd.pages.queries import RunOrder, RunPageQuery
from ckptstore import human
from ckptstore.commits.catalog import Checkpoint, State, has_branches
from ckptstore.commits.goodput import Account, EndOf
from ckptstore.names import Attempt
from ckptstore.retention.policy import KeepDecision

SAVE_SECONDS = "save seconds"
SIZE = "size"
PAGE_ROWS = 50
_WRITERS: Mapping[str, Callable[[float], str]] = {
    SAVE_SECONDS: human.duration,
    SIZE: lambda value: human.size(int(value)),
}
_METRICS_SHOWN = 40
_METRICS_IN_A_ROW = 2
_GAPS = 12
_SLACK_S = 60.0
_LONGEST_S = 24 * 3600.0
"""If it is not known whether the trainer has ended, a run is not called stalled after this time."""


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run in the list."""

    summary: RunSummary
    age_s: float | None
    """Age of its newest checkpoint; None if it has none."""
    trend: str
    """Points of a polyline."""
    trend_of: str
    num_uploads: int | None
    """None if unknown."""
    num_restores: int
    stalled: str
    """Why it is called stalled: its trainer has not ended, and the next commit is overdue. Empty if it is not."""
    ended: str
    """How its trainer ended, if that is known."""

    @property
    def tags(self) -> list[tuple[str, str]]:
        """The tags of its newest checkpoint."""
        return sorted(self.summary.latest.tags.items()) if self.summary.latest else []


def chosen_runs(summaries: Sequence[RunSummary], text: str, order: RunOrder) -> list[RunSummary]:
    """The runs with `text` in their name, or in a tag of their newest checkpoint, in an order."""
    found = [summary for summary in summaries if text.lower() in _searched(summary)]
    keys: dict[RunOrder, Callable[[RunSummary], float]] = {
        RunOrder.NEWEST: lambda summary: -summary.latest.committed_at if summary.latest else inf,
        RunOrder.LARGEST: lambda summary: -summary.stored_bytes,
        RunOrder.MOST: lambda summary: -summary.num_checkpoints,
    }
    return sorted(found, key=keys[order]) if order in keys else found


def _searched(summary: RunSummary) -> str:
    tags = summary.latest.tags.items() if summary.latest else ()
    return "\n".join([summary.run, *(f"{name}={value}" for name, value in tags)]).lower()


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """A checkpoint in the list of its run."""

    checkpoint: Checkpoint
    age_s: float
    reasons: tuple[str, ...] | None
    """The reasons to keep it; empty if the policy does not keep it; None if unknown."""
    removed: bool
    """Whether the preview removes it."""
    metrics: tuple[tuple[str, float], ...]
    """Some of its metrics, without the plotted one."""
    num_more: int


@dataclass(frozen=True, slots=True)
class Preview:
    """The effect of a prune."""

    rules: str
    """As options of ckptctl prune."""
    num_kept: int
    num_removed: int
    removed_bytes: int


@dataclass(frozen=True, slots=True)
class RunView:
    """One run."""

    run: str
    query: RunPageQuery
    total: int
    """Number of checkpoints read."""
    stored_bytes: int
    num_matching: int
    num_pages: int
    newest: Checkpoint | None
    age_s: float | None
    states: tuple[tuple[State, int], ...]
    metrics: tuple[str, ...]
    plots_metric: bool
    """Whether the plot shows a metric, not a size or duration."""
    branched: bool
    """Whether it has more than one generation."""
    chart: Plot | None
    legend: tuple[tuple[str, str], ...]
    """Class and name of each line, if the plot has several."""
    rows: tuple[CheckpointRow, ...]
    preview: Preview | None


def run_row(
    summary: RunSummary,
    recent: Sequence[Checkpoint],
    num_uploads: int | None,
    num_restores: int,
    now: float,
    account: Account | None = None,
) -> RunRow:
    """A run with data of its newest checkpoints. recent: newest step first. account: None if it is not known."""
    known = [c for c in reversed(recent) if c.state is State.COMMITTED]
    metric = _main_metric(known)
    values = [_value(c, metric) for c in known]
    age_s = max(0.0, now - summary.latest.committed_at) if summary.latest else None
    ended = account.attempts[-1].ended if account is not None else EndOf.RUNNING
    alive = ended in (EndOf.RUNNING, EndOf.VANISHED) and not num_uploads
    stalled = _overdue(known, now, _LONGEST_S if account is None else inf) if alive else ""
    how = "" if ended is EndOf.RUNNING else str(ended)
    return RunRow(summary, age_s, sparkline(values), metric, num_uploads, num_restores, stalled, how)


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


def run_view(
    run: str,
    checkpoints: Sequence[Checkpoint],
    reasons: Mapping[Attempt, tuple[str, ...]] | None,
    pruned: Sequence[KeepDecision] | None,
    query: RunPageQuery,
    now: float,
    other: Sequence[Checkpoint] = (),
) -> RunView:
    """One run. checkpoints: newest step first. pruned: the decisions of the previewed prune. other: of the run
    query.other.
    """
    metrics = _metrics(checkpoints)
    if query.metric not in metrics:
        query = replace(query, metric=_main_metric(checkpoints))
    matching = [c for c in checkpoints if _matches(c, query)]
    num_pages = -(-len(matching) // PAGE_ROWS) or 1
    query = replace(query, page=min(max(1, query.page), num_pages))
    shown = matching[(query.page - 1) * PAGE_ROWS : query.page * PAGE_ROWS]
    removed = {v.checkpoint.attempt for v in pruned or () if not v.reasons}
    newest = next((c for c in checkpoints if c.state is State.COMMITTED), None)
    states = Counter(c.state for c in checkpoints)
    lines = _lines(query, matching, [c for c in other if c.state is State.COMMITTED])
    return RunView(
        run=run,
        query=query,
        total=len(checkpoints),
        stored_bytes=sum(c.stored_bytes for c in checkpoints),
        num_matching=len(matching),
        num_pages=num_pages,
        newest=newest,
        age_s=max(0.0, now - newest.committed_at) if newest else None,
        states=tuple((state, states[state]) for state in State if states[state]),
        metrics=metrics,
        plots_metric=query.metric not in _WRITERS,
        branched=has_branches(checkpoints),
        chart=_chart(matching, query, [found for _, found in lines]),
        legend=_legend(run, query, lines),
        rows=tuple(_row(c, reasons, c.attempt in removed, query.metric, now) for c in shown),
        preview=_preview(pruned, query),
    )


def _row(
    checkpoint: Checkpoint, reasons: Mapping[Attempt, tuple[str, ...]] | None, removed: bool, plotted: str, now: float
) -> CheckpointRow:
    others = sorted(item for item in checkpoint.metrics.items() if item[0] != plotted)
    return CheckpointRow(
        checkpoint=checkpoint,
        age_s=max(0.0, now - checkpoint.committed_at),
        reasons=reasons.get(checkpoint.attempt, ()) if reasons is not None else None,
        removed=removed,
        metrics=tuple(others[:_METRICS_IN_A_ROW]),
        num_more=max(0, len(others) - _METRICS_IN_A_ROW),
    )


def _preview(pruned: Sequence[KeepDecision] | None, query: RunPageQuery) -> Preview | None:
    if pruned is None:
        return None
    given = (("--keep", query.keep), ("--keep-every", query.every), ("--keep-best", query.best))
    rules = " ".join(f"{option} {value}" for option, value in given if value)
    if query.healthy:
        rules = f"{rules} --keep-healthy".lstrip()
    if query.abandoned is not None:
        rules += f" --keep-abandoned {query.abandoned}d"
    gone = [v.checkpoint for v in pruned if not v.reasons]
    return Preview(rules, len(pruned) - len(gone), len(gone), sum(c.stored_bytes for c in gone))


def _matches(checkpoint: Checkpoint, query: RunPageQuery) -> bool:
    return (
        query.state in (None, checkpoint.state)
        and (query.min_step is None or checkpoint.step >= query.min_step)
        and (query.max_step is None or checkpoint.step <= query.max_step)
    )


def _metrics(checkpoints: Sequence[Checkpoint]) -> tuple[str, ...]:
    """The choices of the plot: metrics, most frequent first if there are many, then sizes and durations."""
    counts = Counter(name for c in checkpoints for name in c.metrics if name not in _WRITERS)
    names = sorted(name for name, _ in counts.most_common(_METRICS_SHOWN))
    return (*names, SAVE_SECONDS, SIZE)


def _main_metric(checkpoints: Sequence[Checkpoint]) -> str:
    """The metric that most checkpoints have; without metrics, the duration of saves."""
    counts = Counter(name for c in checkpoints for name in c.metrics)
    return min(counts, key=lambda name: (-counts[name], "loss" not in name, name), default=SAVE_SECONDS)


def _value(checkpoint: Checkpoint, metric: str) -> float:
    figures = {SAVE_SECONDS: checkpoint.save_seconds, SIZE: float(checkpoint.stored_bytes)}
    return figures.get(metric, checkpoint.metrics.get(metric, float("nan")))


def _points(checkpoints: Sequence[Checkpoint], metric: str) -> list[Point]:
    return [
        Point(c.step, value, f"step {c.step:,}: {_written(value, metric)} ({c.state})", c.state)
        for c in checkpoints
        if isfinite(value := _value(c, metric))
    ]


def _lines(
    query: RunPageQuery, matching: Sequence[Checkpoint], other: Sequence[Checkpoint]
) -> list[tuple[str, list[Point]]]:
    """The lines beside that of the metric: names and points."""
    found = []
    if query.also:
        found.append((query.also, _points([c for c in matching if c.state is State.COMMITTED], query.also)))
    if query.other:
        found.append((f"{query.metric} of {query.other}", _points(other, query.metric)))
    return found


def _chart(checkpoints: Sequence[Checkpoint], query: RunPageQuery, more: Sequence[Sequence[Point]]) -> Plot | None:
    points = _points(checkpoints, query.metric)
    write = _WRITERS.get(query.metric, compact)
    return plot(points, write, more=more, log=query.log) if points else None


def _legend(run: str, query: RunPageQuery, lines: Sequence[tuple[str, list[Point]]]) -> tuple[tuple[str, str], ...]:
    if not lines:
        return ()
    names = [f"{query.metric} of {run}", *(name if points else f"{name}: no values" for name, points in lines)]
    return tuple(zip(("line-a", "line-b", "line-c"), names, strict=False))


def _written(value: float, metric: str) -> str:
    write = _WRITERS.get(metric)
    return write(value) if write else f"{metric} {value:.5g}"
