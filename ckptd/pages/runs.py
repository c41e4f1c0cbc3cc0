"""Views of the list of runs, and of one run with its checkpoints. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from urllib.parse import urlencode

import msgspec

from ckptd.index import RunSummary
from ckptd.pages.charts import Plot, Point, compact, plot, sparkline
from ckptstore import human
from ckptstore.commits.catalog import Checkpoint, State, has_branches
from ckptstore.format.records import Policy
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPageQuery:
    """The query of a run's page."""

    metric: str = ""
    state: State | None = None
    min_step: int | None = None
    max_step: int | None = None
    page: int = 1
    keep: int | None = None
    """Preview of a prune: number of newest checkpoints to keep."""
    every: int | None = None
    """Step interval of checkpoints to keep."""
    best: str = ""
    """The best by a metric: METRIC:min:N or METRIC:max:N."""
    abandoned: int | None = None
    """Days for which abandoned checkpoints are kept; None: the default of a policy."""
    healthy: bool = False
    """Keep the newest checkpoint without NaN and Inf, too."""

    @property
    def policy(self) -> Policy | None:
        """The policy to preview; None without a preview. Raises InvalidPolicy."""
        if not (self.keep or self.every or self.best or self.healthy):
            return None
        best = (self.best,) if self.best else ()
        policy = Policy(
            keep_last=self.keep or 0, keep_every=self.every or 0, keep_best=best, keep_healthy=int(self.healthy)
        )
        if self.abandoned is None:
            return policy
        return msgspec.structs.replace(policy, keep_abandoned_s=self.abandoned * 24 * 3600.0)

    def link(self, **changed: object) -> str:
        """A query string like this one, with some values changed."""
        query = replace(self, **changed)  # type: ignore[arg-type]
        chosen = {
            "metric": query.metric,
            "state": query.state,
            "min_step": query.min_step,
            "max_step": query.max_step,
            "page": query.page if query.page > 1 else None,
            "keep": query.keep,
            "every": query.every,
            "best": query.best,
            "abandoned": query.abandoned,
            "healthy": 1 if query.healthy else None,
        }
        return "?" + urlencode({name: value for name, value in chosen.items() if value not in (None, "")})


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
    rows: tuple[CheckpointRow, ...]
    preview: Preview | None


def run_row(
    summary: RunSummary, recent: Sequence[Checkpoint], num_uploads: int | None, num_restores: int, now: float
) -> RunRow:
    """A run with data of its newest checkpoints. recent: newest step first."""
    known = [c for c in reversed(recent) if c.state is State.COMMITTED]
    metric = _main_metric(known)
    values = [_value(c, metric) for c in known]
    age_s = max(0.0, now - summary.latest.committed_at) if summary.latest else None
    return RunRow(summary, age_s, sparkline(values), metric, num_uploads, num_restores)


def run_view(
    run: str,
    checkpoints: Sequence[Checkpoint],
    reasons: Mapping[Attempt, tuple[str, ...]] | None,
    pruned: Sequence[KeepDecision] | None,
    query: RunPageQuery,
    now: float,
) -> RunView:
    """One run. checkpoints: newest step first. pruned: the decisions of the previewed prune."""
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
        chart=_chart(matching, query.metric),
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


def _chart(checkpoints: Sequence[Checkpoint], metric: str) -> Plot | None:
    points = [
        Point(c.step, value, f"step {c.step:,}: {_written(value, metric)} ({c.state})", c.state)
        for c in checkpoints
        if isfinite(value := _value(c, metric))
    ]
    return plot(points, _WRITERS.get(metric, compact)) if points else None


def _written(value: float, metric: str) -> str:
    write = _WRITERS.get(metric)
    return write(value) if write else f"{metric} {value:.5g}"
