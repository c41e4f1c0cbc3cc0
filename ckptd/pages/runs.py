"""The view of one run with its checkpoints. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ckptd.pages.branches import Branches, branches
from ckptd.pages.curves import WRITERS, Curves, main_metric, metric_curves, metric_names, time_curves
from ckptd.pages.queries import RunPageQuery
from ckptstore.commits.catalog import Checkpoint, State, has_branches
from ckptstore.names import Attempt
from ckptstore.retention.policy import KeepDecision

PAGE_ROWS = 50
_METRICS_IN_A_ROW = 2
_CHIPS = 12


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
    chips: tuple[str, ...]
    """The choices of the plot: the chosen ones, then others."""
    more_chips: tuple[str, ...]
    """The choices after these."""
    plots_metric: bool
    """Whether the plot shows a metric, not a size or duration."""
    branched: bool
    """Whether it has more than one generation."""
    curves: Curves
    over_time: tuple[Curves, ...]
    branches: Branches | None
    """None unless it has branches."""
    rows: tuple[CheckpointRow, ...]
    preview: Preview | None


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
    metrics = metric_names(checkpoints)
    metric = query.metric if query.metric in metrics else main_metric(checkpoints)
    query = replace(query, metric=metric, also=tuple(name for name in query.also if name in metrics and name != metric))
    chips = (*query.plotted, *(name for name in metrics if name not in query.plotted))
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
        chips=chips[:_CHIPS],
        more_chips=chips[_CHIPS:],
        plots_metric=query.metric not in WRITERS,
        branched=has_branches(checkpoints),
        curves=metric_curves(matching, query, other),
        over_time=time_curves(checkpoints, now),
        branches=branches(checkpoints) if has_branches(checkpoints) else None,
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
