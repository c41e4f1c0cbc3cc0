"""Figures from the checkpoints of a run: sizes, time until durable, interval, time per step, cost of saves. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import prod
from statistics import median

from ckptplan.model import Model, Term, measured_terms
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
    alike = [c for c in usable if abs(c.needed_bytes - newest.needed_bytes) <= _SAME_SIZE * newest.needed_bytes]
    alike = alike[:_NEWEST]
    pairs = [
        (new, old) for new, old in pairwise(usable[: 4 * _NEWEST]) if new.attempt.generation == old.attempt.generation
    ]
    apart = [(new.created_at - old.created_at, new.step - old.step) for new, old in pairs]
    apart = [(seconds, steps) for seconds, steps in apart if seconds > 0 and steps > 0]
    known = list(costs)
    slowdowns = [cost.slowdown_s for cost in known if cost.slowdown_s is not None]
    return History(
        num_checkpoints=len(alike),
        durable_s=median(c.save_seconds for c in alike),
        slowest_durable_s=max(c.save_seconds for c in alike),
        step_s=median(seconds / steps for seconds, steps in apart) if apart else None,
        stall_s=median(cost.stall_s for cost in known) if known else None,
        slowdown_s=median(slowdowns) if slowdowns else None,
    )


def contents(checkpoint: Checkpoint, content: Content) -> tuple[Model, tuple[Term, ...]]:
    """The parameters of a checkpoint and its bytes for each of them, without those that are casts of others."""
    sizes, derived = entry_bytes(content), derived_bytes(content)
    elements: dict[str, int] = {}
    num_bytes: dict[tuple[str, str], int] = {}
    for name, dtype, shape in content.entries.rows():
        term = _term_of(name)
        if term == "weights":
            elements[name] = prod(shape)
        key = (term, dtype if term != "other" else "")
        num_bytes[key] = num_bytes.get(key, 0) + sizes[name] - derived.get(name, 0)
    parameters = max(1, sum(elements.values()))
    share = checkpoint.needed_bytes / checkpoint.raw_bytes if checkpoint.raw_bytes else 1.0
    return Model(parameters=parameters, source=checkpoint.id), _ordered(num_bytes, parameters, share)


def _ordered(num_bytes: Mapping[tuple[str, str], int], parameters: int, share: float) -> tuple[Term, ...]:
    order = ["weights", "master", "momentum", "variance", "grads", "other"]
    return measured_terms(
        dict(sorted(num_bytes.items(), key=lambda i: (order.index(i[0][0]), i[0]))), parameters, share
    )


def _term_of(name: str) -> str:
    item, _, rest = name.partition("/")
    if item == "model":
        return "weights"
    if item == "grads":
        return "grads"
    if "state/" in rest:
        return _TERMS.get(rest.rpartition("/")[2], "other")
    return "other"
