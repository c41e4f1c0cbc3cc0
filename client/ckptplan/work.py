"""The number of steps of a training run and its duration, with and without failures. Pure."""

from __future__ import annotations

from math import ceil, floor

import msgspec

from ckptplan.failures import ettr
from ckptstore.errors import InvalidRequest


def global_batch(accumulation: int, processes: int, micro_batch: int) -> int:
    """Samples per optimizer step: accumulation × data-parallel processes (nodes × processes per node) × micro batch."""
    for name, value in (("accumulation", accumulation), ("processes", processes), ("micro batch", micro_batch)):
        if value < 1:
            raise InvalidRequest(f"{name} {value} is not positive", "Give at least 1")
    return accumulation * processes * micro_batch


def num_steps(samples: int, batch: int, epochs: float = 1.0) -> int:
    """Optimizer steps for all epochs; the last batch of each may be smaller."""
    if samples < 1 or batch < 1 or epochs <= 0:
        raise InvalidRequest("samples, batch and epochs must be positive", "Give at least one sample and epoch")
    whole, rest = floor(epochs), epochs - floor(epochs)
    return whole * ceil(samples / batch) + ceil(rest * samples / batch)


class TrainingTime(msgspec.Struct, frozen=True, kw_only=True):
    """The expected duration of a run, in seconds, and where it goes."""

    steps: int
    productive_s: float
    """Steps alone."""
    saving_s: float
    """Stall and slowdown of all saves."""
    without_failures_s: float
    """productive_s and saving_s."""
    num_saves: int
    num_failures: float | None
    """Expected number; None if no failure rate is known."""
    lost_s: float | None
    """Work done again after failures: half an interval and the time until a save is durable, each."""
    restart_s: float | None
    with_failures_s: float | None
    """All of it; None also if no progress is expected at this failure rate."""


def training_time(
    steps: int,
    step_s: float,
    interval_s: float,
    cost_s: float,
    mtbf_s: float | None,
    restart_s: float,
    durable_s: float,
) -> TrainingTime:
    """productive / ETTR, where ETTR is that of failures.ettr; failures are total / M."""
    productive = steps * step_s
    saving = productive / interval_s * cost_s
    total = failures = lost = restarts = None
    if mtbf_s is not None:
        ratio = ettr(interval_s, cost_s, mtbf_s, restart_s, durable_s)
        if ratio > 0:
            total = productive / ratio
            failures = total / mtbf_s
            lost, restarts = failures * (interval_s / 2 + durable_s), failures * restart_s
    return TrainingTime(
        steps=steps,
        productive_s=productive,
        saving_s=saving,
        without_failures_s=productive + saving,
        num_saves=floor(productive / interval_s),
        num_failures=failures,
        lost_s=lost,
        restart_s=restarts,
        with_failures_s=total,
    )
