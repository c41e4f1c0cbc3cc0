"""Figures from the checkpoints of a run: sizes, time until durable, interval, time per step, cost of saves. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import prod
from statistics import median

from ckptplan.model import Model, Term
from ckptstore.commits.catalog import Checkpoint
from ckptstore.format.documents import Content
from ckptstore.format.planning import derived_bytes, entry_bytes
from ckptstore.format.records import SaveCost
from ckptstore.values import Record

_NEWEST = 5
_SAME_SIZE = 0.01

_TERMS = {
    "exp_avg": "momentum",
    "momentum_buffer": "momentum",
    "momentum": "momentum",
    "exp_avg_sq": "variance",
    "square_avg": "variance",
    "variance": "variance",
    "master": "master",
    "master_param": "master",
    "master_weight": "master",
    "fp32_param": "master",
}
"""The names that optimizers give their state."""
_ORDER = ("weights", "master", "momentum", "variance", "grads", "other")


class History(Record):
    """Medians over the newest checkpoints of a run. None: not known."""

    num_checkpoints: int
    """The number of checkpoints that were looked at."""
    durable_s: float
    """From the capture to the commit."""
    slowest_durable_s: float
    """The same of the slowest of them, not a median."""
    step_s: float | None
    """From step to step, saves included."""
    stall_s: float | None
    slowdown_s: float | None


def history(usable: Sequence[Checkpoint], costs: Iterable[SaveCost] = ()) -> History:
    """The history of one run. usable: its committed checkpoints, newest first. costs: as the newest of them hold."""
    newest = usable[0]
    most = _SAME_SIZE * newest.needed_bytes
    alike = [c for c in usable if abs(c.needed_bytes - newest.needed_bytes) <= most][:_NEWEST]
    steps = [
        (new.created_at - old.created_at) / (new.step - old.step)
        for new, old in pairwise(usable[: 4 * _NEWEST])
        if new.attempt.generation == old.attempt.generation and new.created_at > old.created_at and new.step > old.step
    ]
    known = list(costs)
    slowdowns = [cost.slowdown_s for cost in known if cost.slowdown_s is not None]
    return History(
        num_checkpoints=len(alike),
        durable_s=median(c.save_seconds for c in alike),
        slowest_durable_s=max(c.save_seconds for c in alike),
        step_s=median(steps) if steps else None,
        stall_s=median(cost.stall_s for cost in known) if known else None,
        slowdown_s=median(slowdowns) if slowdowns else None,
    )


def contents(checkpoint: Checkpoint, content: Content) -> tuple[Model, tuple[Term, ...]]:
    """The parameters of a checkpoint and its bytes for each of them, without those that are casts of others."""
    sizes, derived = entry_bytes(content), derived_bytes(content)
    parameters, num_bytes = 0, Counter[tuple[str, str]]()
    for name, dtype, shape in content.entries.rows():
        term = _term_of(name)
        if term == "weights":
            parameters += prod(shape)
        num_bytes[term, dtype if term != "other" else ""] += sizes[name] - derived.get(name, 0)
    parameters = max(1, parameters)
    share = checkpoint.needed_bytes / checkpoint.raw_bytes if checkpoint.raw_bytes else 1.0
    terms = tuple(
        Term(name=name, dtype=dtype, bytes_per_parameter=num_bytes[name, dtype] / parameters, compressed=share)
        for name, dtype in sorted(num_bytes, key=lambda kind: (_ORDER.index(kind[0]), kind))
    )
    return Model(parameters=parameters, source=checkpoint.id), terms


def _term_of(name: str) -> str:
    item, _, rest = name.partition("/")
    if item == "model":
        return "weights"
    if item == "grads":
        return "grads"
    if "state/" in rest:
        return _TERMS.get(rest.rpartition("/")[2], "other")
    return "other"
