"""When a run began to go wrong: the first checkpoint whose tensors have NaN or Inf, or left their range. Pure.

A tensor leaves its range if its largest magnitude exceeds all before by a factor of 16, times the factor by which it
has varied so far; so a state that grows steadily does not. A tensor that becomes all zeros does too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from enum import StrEnum
from math import log2

import msgspec

from ckptstore.analysis.statistics import CheckpointStatistics, TensorStatistics, read_statistics
from ckptstore.codecs.dtypes import is_float
from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import Damaged, InvalidRequest, NoCheckpoint, ObjectMissing
from ckptstore.format.statistics import is_counter
from ckptstore.reading.source import Source
from ckptstore.values import Record

_MARGIN = 4.0  # powers of two
_LEAST_HISTORY = 2  # earlier checkpoints, of which at least this many have numbers other than zero
_MOST_TENSORS = 50


class Cause(StrEnum):
    """How a tensor went wrong."""

    NOT_FINITE = "not_finite"
    LEFT_RANGE = "left_range"
    ALL_ZEROS = "all_zeros"


class TensorFinding(Record):
    """A tensor that went wrong, and its statistics in the checkpoint before, in this one, and in the next one."""

    tensor: str
    cause: Cause
    text: str
    """The cause in words."""
    before: TensorStatistics | None
    found: TensorStatistics
    after: TensorStatistics | None


class RunFinding(Record):
    """The first checkpoint of a run that went wrong, with its neighbours. checkpoint: null if none did."""

    run: str
    num_checkpoints: int
    """Checkpoints whose statistics were compared."""
    skipped: list[str]
    """Checkpoints that have no statistics, and why."""
    checkpoint: str | None = None
    step: int | None = None
    before: str | None = None
    after: str | None = None
    num_tensors: int = 0
    """Tensors that went wrong in this checkpoint."""
    tensors: list[TensorFinding] = []
    """The worst of them, 50 at most: first those with NaN or Inf."""


def series(source: Source, run: str, checkpoints: Iterable[Checkpoint]) -> tuple[list[CheckpointStatistics], list[str]]:
    """The statistics of the live lineage, oldest step first; and the checkpoints without, and why.

    Raises NoCheckpoint if none is given, or Unavailable.
    """
    live = sorted((c for c in checkpoints if c.live), key=lambda c: c.attempt)
    if not live:
        raise NoCheckpoint(f"run {run!r} has no checkpoint in {source.url}", "ckptctl runs lists the runs")
    found: list[CheckpointStatistics] = []
    skipped: list[str] = []
    for checkpoint in live:
        try:
            found.append(read_statistics(source, checkpoint))
        except (Damaged, InvalidRequest, ObjectMissing, NoCheckpoint) as error:
            skipped.append(error.message)
    return found, skipped


def first_trouble(run: str, steps: Sequence[CheckpointStatistics], skipped: Sequence[str] = ()) -> RunFinding:
    """The first of some checkpoints, given oldest first, in which a tensor went wrong. Pure."""
    history: dict[str, list[TensorStatistics]] = defaultdict(list)
    healthy = RunFinding(run=run, num_checkpoints=len(steps), skipped=list(skipped))
    for before, one, after in zip([None, *steps], steps, [*steps[1:], None], strict=False):
        wrong = [(tensor, *cause) for tensor in one.tensors.values() if (cause := _cause(tensor, history[tensor.name]))]
        if wrong:
            wrong.sort(key=lambda item: -item[2])
            old, new = ({} if step is None else step.tensors for step in (before, after))
            return msgspec.structs.replace(
                healthy,
                checkpoint=one.checkpoint.id,
                step=one.checkpoint.step,
                before=before and before.checkpoint.id,
                after=after and after.checkpoint.id,
                num_tensors=len(wrong),
                tensors=[
                    TensorFinding(
                        tensor=tensor.name,
                        cause=cause,
                        text=text,
                        before=old.get(tensor.name),
                        found=tensor,
                        after=new.get(tensor.name),
                    )
                    for tensor, cause, _, text in wrong[:_MOST_TENSORS]
                ],
            )
        for tensor in one.tensors.values():
            history[tensor.name].append(tensor)
    return healthy


def _cause(tensor: TensorStatistics, history: Sequence[TensorStatistics]) -> tuple[Cause, float, str] | None:
    """Why a tensor went wrong, how badly, and in words; None if it did not."""
    if is_counter(tensor.name, tensor.elements):
        return None
    if not tensor.is_finite:
        return Cause.NOT_FINITE, float("inf"), f"{tensor.nan:,} NaN and {tensor.inf:,} Inf of {tensor.elements:,}"
    known = [log2(one.largest) for one in history if one.largest > 0]
    if not is_float(tensor.dtype) or len(known) < _LEAST_HISTORY:
        return None
    if tensor.largest == 0:
        is_new = len(known) == len(history)
        return (Cause.ALL_ZEROS, 0.0, f"all {tensor.elements:,} elements are 0") if is_new else None
    excess = log2(tensor.largest) - max(known) - (max(known) - min(known)) - _MARGIN
    if excess <= 0:
        return None
    low, high = 2.0 ** min(known), 2.0 ** max(known)
    return Cause.LEFT_RANGE, excess, f"largest magnitude {tensor.largest:.3g}, from {low:.3g} to {high:.3g} before"
