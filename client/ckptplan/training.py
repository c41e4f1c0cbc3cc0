"""Failures, the best interval between saves, and the time that training takes with both. Pure."""

from __future__ import annotations

from math import ceil, floor, inf, sqrt

from ckptstore.errors import InvalidRequest
from ckptstore.values import Record

DAY_S = 86_400.0


class FailureRate(Record):
    """Failures that end a job, per 1000 node-days, as published. A projection: measured jobs fail more often."""

    per_1000_node_days: float
    source: str


_ACCELERATORS_PER_NODE = 8

PRESETS = {
    "rsc-1": FailureRate(per_1000_node_days=6.50, source="Meta RSC-1, arXiv 2410.21680"),
    "rsc-2": FailureRate(per_1000_node_days=2.34, source="Meta RSC-2, arXiv 2410.21680"),
    "llama3": FailureRate(
        per_1000_node_days=419 / (54 * 2048) * 1000, source="Llama 3, arXiv 2407.21783: 419 in 54 days on 2,048 nodes"
    ),
    "mlcommons": FailureRate(
        per_1000_node_days=1000 * _ACCELERATORS_PER_NODE * 24 / 50_000,
        source="MLCommons Storage: 50,000 hours per accelerator, 8 accelerators per node",
    ),
}


def mtbf(nodes: int, per_1000_node_days: float) -> float:
    """Mean time between failures of a job on all nodes: 1 / (nodes · rate). Source: Meta, arXiv 2410.21680."""
    if not per_1000_node_days > 0:
        raise InvalidRequest(f"a failure rate of {per_1000_node_days} is not positive", "Leave it out for none")
    return 1000 * DAY_S / (nodes * per_1000_node_days)


def young(cost_s: float, mtbf_s: float) -> float:
    """The optimal interval √(2δM). Source: Young 1974."""
    return sqrt(2 * cost_s * mtbf_s)


def daly(cost_s: float, mtbf_s: float) -> float:
    """The optimal interval √(2δM) · [1 + ⅓√(δ/2M) + δ/18M] − δ; M if δ is 2M or more. Source: Daly, FGCS 2006."""
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    root = sqrt(cost_s / (2 * mtbf_s))
    return young(cost_s, mtbf_s) * (1 + root / 3 + root**2 / 9) - cost_s


def nvidia(cost_s: float, mtbf_s: float, restart_s: float) -> float:
    """The optimal interval δ + √(2(M + R)δ + δ²). Source: NVIDIA, arXiv 2410.18124."""
    return cost_s + sqrt(2 * (mtbf_s + restart_s) * cost_s + cost_s**2)


def ettr(interval_s: float, cost_s: float, mtbf_s: float, restart_s: float = 0.0, durable_s: float = 0.0) -> float:
    """The effective training time ratio, E = (1 − (u0 + Δt/2 + d)/M) / (1 + w/Δt), at least 0.

    Source: Meta, arXiv 2410.21680, with d = 0. Our extension is d, the time until a save is durable: a failure before
    that loses the work since the save before it.
    """
    kept = 1 - (restart_s + interval_s / 2 + durable_s) / mtbf_s
    return max(0.0, kept) / (1 + cost_s / interval_s) if interval_s > 0 else 0.0


def best_interval(cost_s: float, mtbf_s: float, restart_s: float = 0.0, durable_s: float = 0.0) -> float:
    """The interval with the highest `ettr`: √(w² + 2wM(1 − (u0 + d)/M)) − w, but at least d; inf if there is none.

    The derivative of E is zero there. It is at least d because one save must be durable before the next begins.
    """
    left = 1 - (restart_s + durable_s) / mtbf_s
    if left <= 0:
        return inf
    return max(sqrt(cost_s**2 + 2 * cost_s * mtbf_s * left) - cost_s, durable_s)


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


class TrainingTime(Record):
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
