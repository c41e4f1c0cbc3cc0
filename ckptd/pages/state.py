"""Views of the statistics of tensors: curves over steps, tables, and differences between checkpoints. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log10
from urllib.parse import quote

from ckptd.services.state_history import Development
from ckptstore.charts import Plot, Point, plot
from ckptstore.reading.difference import Unequal
from ckptstore.reading.history import RunFinding
from ckptstore.reading.statistics import CheckpointStatistics, TensorStatistics

_SHOWN = 100
_SOLE_CURVE = 500


@dataclass(frozen=True, slots=True)
class StepRow:
    """One tensor in one checkpoint."""

    id: str
    step: int
    tensor: TensorStatistics


@dataclass(frozen=True, slots=True)
class RunStateView:
    """How a run developed."""

    run: str
    finding: RunFinding
    tensors: tuple[str, ...]
    """The tensors to choose from."""
    chosen: str
    chart: Plot | None
    """The rms of the chosen tensor by step, as powers of ten."""
    rows: tuple[StepRow, ...]
    """Its statistics, newest step first."""


@dataclass(frozen=True, slots=True)
class ChangeRow:
    """A tensor that differs from an earlier checkpoint. The fraction counts elements in chunks that differ."""

    name: str
    before: TensorStatistics | None
    after: TensorStatistics | None
    fraction: float


@dataclass(frozen=True, slots=True)
class CheckpointStateView:
    """The tensors of one checkpoint."""

    tensors: tuple[TensorStatistics, ...]
    """Those with NaN or Inf, then the largest ones."""
    num_tensors: int
    missing: tuple[str, ...]
    num_not_finite: int


@dataclass(frozen=True, slots=True)
class DifferenceView:
    """What changed since an earlier checkpoint."""

    before: str
    unequal: Unequal
    changes: tuple[ChangeRow, ...]
    num_changes: int


def run_state_view(run: str, found: Development, chosen: str) -> RunStateView:
    """How a run developed. chosen: a tensor; if it is unknown, the first that went wrong, or the first of all."""
    names = tuple(name for name, tensor in found.steps[-1].tensors.items() if tensor.exponents) if found.steps else ()
    wrong = [one.tensor for one in found.finding.tensors]
    if chosen not in names:
        chosen = next((name for name in (*wrong, *names)), "")
    rows = [
        StepRow(one.checkpoint.id, one.checkpoint.step, one.tensors[chosen])
        for one in found.steps
        if chosen in one.tensors
    ]
    points = [
        Point(
            row.step,
            log10(row.tensor.rms),
            f"step {row.step}: rms {row.tensor.rms:.4g}, {row.tensor.nan} NaN, {row.tensor.inf} Inf",
            "" if row.tensor.is_finite else "corrupt",
            f"/checkpoints/{quote(row.id)}/state",
        )
        for row in rows
        if row.tensor.rms
    ]
    options = names[:_SOLE_CURVE] if chosen in names[:_SOLE_CURVE] or not chosen else (chosen, *names[:_SOLE_CURVE])
    chart = plot([points], lambda power: f"{10**power:.2g}") if points else None
    return RunStateView(run, found.finding, options, chosen, chart, tuple(reversed(rows)))


def checkpoint_state_view(found: CheckpointStatistics) -> CheckpointStateView:
    """The tensors of one checkpoint."""
    ordered = sorted(found.tensors.values(), key=lambda one: (one.is_finite, not one.exponents, -one.elements))
    wrong = sum(not one.is_finite for one in ordered)
    return CheckpointStateView(tuple(ordered[:_SHOWN]), len(ordered), tuple(found.missing), wrong)


def difference_view(
    before: CheckpointStatistics | None, after: CheckpointStatistics | None, id: str, unequal: Unequal
) -> DifferenceView:
    """What changed since the checkpoint `id`."""
    rows: Sequence[ChangeRow] = [
        ChangeRow(
            name,
            before.tensors.get(name) if before is not None else None,
            after.tensors.get(name) if after is not None else None,
            fraction,
        )
        for name, fraction in unequal.changed.items()
    ]
    ordered = sorted(rows, key=lambda row: -_growth(row))
    return DifferenceView(id, unequal, tuple(ordered[:_SHOWN]), len(rows))


def _growth(row: ChangeRow) -> float:
    """How much the largest magnitude changed, in powers of ten."""
    old, new = (one.largest if one is not None else 0.0 for one in (row.before, row.after))
    return abs(log10(new / old)) if old > 0 and new > 0 else 0.0
