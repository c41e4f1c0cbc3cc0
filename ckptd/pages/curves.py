"""The plots of a run and of a store: metrics by step, also beside other runs; bytes and saves over time. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import isfinite
from typing import NamedTuple
from urllib.parse import quote

from ckptstore import human
from ckptstore.analysis.charts import Plot, Point, compact, plot
from ckptstore.commits.catalog import Checkpoint, State

SAVE_SECONDS = "save seconds"
SIZE = "size"
WRITERS: Mapping[str, Callable[[float], str]] = {
    SAVE_SECONDS: lambda seconds: human.duration(seconds) if seconds >= 1 else f"{seconds:.2g}s",  # apart on an axis
    SIZE: human.size,
}
"""The figures of a checkpoint that can be plotted as well, and how their values are written."""
_METRICS_SHOWN = 40
_LEFT_BEHIND = (State.SUPERSEDED, State.ABANDONED)
_SMALL = (560, 210)


class Curves(NamedTuple):
    """A plot, and the names of its lines, in order."""

    title: str
    axis: str
    chart: Plot | None
    names: tuple[str, ...]


def metric_names(checkpoints: Sequence[Checkpoint]) -> tuple[str, ...]:
    """The choices of the plot: metrics, most frequent first if there are many, then sizes and durations."""
    counts = Counter(name for c in checkpoints for name in c.metrics if name not in WRITERS)
    names = sorted(name for name, _ in counts.most_common(_METRICS_SHOWN))
    return (*names, SAVE_SECONDS, SIZE)


def main_metric(checkpoints: Sequence[Checkpoint]) -> str:
    """The metric that most checkpoints have; without metrics, the duration of saves."""
    counts = Counter(name for c in checkpoints for name in c.metrics)
    return min(counts, key=lambda name: (-counts[name], "loss" not in name, name), default=SAVE_SECONDS)


def value_of(checkpoint: Checkpoint, metric: str) -> float:
    """A metric of a checkpoint, or its size or duration; NaN if it has none."""
    figures = {SAVE_SECONDS: checkpoint.save_seconds, SIZE: float(checkpoint.stored_bytes)}
    return figures.get(metric, checkpoint.metrics.get(metric, float("nan")))


def values_of(checkpoints: Sequence[Checkpoint], metric: str) -> list[float]:
    """The values of those that have one."""
    return [value for c in checkpoints if isfinite(value := value_of(c, metric))]


def metric_curves(
    checkpoints: Sequence[Checkpoint],
    metrics: Sequence[str],
    others: Mapping[str, Sequence[Checkpoint]],
    log: bool,
    smooth: float,
) -> Curves:
    """The metrics by step; the first one also of other runs. log, smooth: see `plot`.

    Lines go through live checkpoints. The other ones are marks of the first metric.
    """
    first, *more = metrics
    live = [c for c in checkpoints if c.live]
    own = _by_step(checkpoints, first)
    lines = {first: [p._replace(on_line=p.kind not in _LEFT_BEHIND) for p in own]}
    lines |= {name: _by_step(live, name) for name in more}
    for run, found in others.items():
        live = [c for c in found if c.live]
        lines[f"{first} of {run}"] = _by_step(live, first, run)
    names = tuple(name if points else f"{name}: no values" for name, points in lines.items())
    title = ", ".join(metrics)
    if not any(lines.values()):
        return Curves(title, "step", None, names)
    write, from_zero = WRITERS.get(first, compact), first in WRITERS and not log
    drawn = plot(list(lines.values()), write, log=log, from_zero=from_zero, smooth=smooth)
    return Curves(title, "step", drawn, names)


def time_curves(checkpoints: Sequence[Checkpoint], now: float) -> tuple[Curves, ...]:
    """Stored bytes and the duration of saves over time; empty with fewer than two checkpoints."""
    known = sorted((c for c in checkpoints if c.committed_at), key=lambda c: c.committed_at)
    if len(known) < 2:
        return ()
    totals = accumulate(c.stored_bytes for c in known)
    stored = [_point(c, c.committed_at - now, total, human.size(total)) for c, total in zip(known, totals, strict=True)]
    saves = [_point(c, c.committed_at - now, c.save_seconds, human.duration(c.save_seconds)) for c in known]
    return tuple(
        Curves(title, "age", plot([points], WRITERS[name], *_SMALL, ages=True, from_zero=True), (title,))
        for title, points, name in (("stored bytes", stored, SIZE), ("duration of saves", saves, SAVE_SECONDS))
    )


def stored_curves(rows: Sequence[tuple[str, float, float]], groups: Sequence[str], now: float) -> Curves:
    """Bytes that are stored now, by the time of their commit: in all, and of groups of runs.

    rows: run, time and bytes, by ascending time. groups: what stands before the slash in the names of runs.
    """
    lines = []
    for name in ("", *groups):
        own = [(at, size) for run, at, size in rows if name in ("", run.partition("/")[0])]
        lines.append(
            [
                Point(at - now, y, f"{human.age(now - at)} ago: {human.size(y)}{name and f' of {name}'}")
                for (at, size), total in zip(own, accumulate(size for _, size in own), strict=True)
                for y in (total - size, total)
            ]
        )
    return Curves("stored bytes", "age", plot(lines, WRITERS[SIZE], ages=True, from_zero=True), ("all runs", *groups))


def _by_step(checkpoints: Sequence[Checkpoint], metric: str, run: str = "") -> list[Point]:
    write: Callable[[float], str] = WRITERS.get(metric, lambda value: f"{metric} {value:.5g}")
    return [
        _point(c, c.step, value, f"{write(value)}{f' in {run}' if run else ''}")
        for c in checkpoints
        if isfinite(value := value_of(c, metric))
    ]


def _point(checkpoint: Checkpoint, x: float, y: float, text: str) -> Point:
    title = f"step {checkpoint.step:,}: {text} ({checkpoint.state})"
    return Point(x, y, title, checkpoint.state, f"/checkpoints/{quote(checkpoint.id)}")
