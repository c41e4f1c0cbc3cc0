"""Which coding each element type gets in one save: a pure function of what was measured. No torch.

A save is durable when its chunks are encoded and uploaded. The two go on side by side, so the slower one counts.
From what is encoded soonest, codings are changed for smaller ones, in the order of what that saves per second of
encoding. This makes one sequence of choices, ever slower to encode and ever smaller; which of them it is to be depends
on the time there is.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from ckptstore.format.codings import Coding

INTERVAL_SHARE = 0.5
"""A save is to be durable within this share of the interval between saves."""
WORTH_SAVING = 0.01
"""A coding that saves less than this share of the bytes is not worth its seconds."""


class CodingCost(NamedTuple):
    """What a byte of one element type costs in one coding."""

    seconds: float
    """Of one thread that encodes and hashes it."""
    stored: float
    """Bytes."""


CostTable = Mapping[str, Mapping[Coding, CodingCost]]
"""By element type; all that may be chosen is in it."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The coding of each element type, and what is expected of the save."""

    codings: Mapping[str, Coding]
    encode_s: float
    upload_s: float
    stored_bytes: float

    @property
    def durable_s(self) -> float:
        """Until everything is encoded and uploaded."""
        return max(self.encode_s, self.upload_s)


class _Step(NamedTuple):
    """From one coding to a smaller one, for all bytes of an element type."""

    gain: float
    """Bytes saved per second."""
    dtype: str
    coding: Coding
    seconds: float
    saved: float


def choose(
    raw_bytes: Mapping[str, float], costs: CostTable, upload_s: float, threads: float, interval_s: float | None
) -> Choice:
    """The smallest choice that is durable well inside the interval, or without one, that which is durable soonest.

    raw_bytes: of each element type. upload_s: seconds per stored byte. threads: how many encode at a time. interval_s:
    from save to save; None if nothing is known of it. Then soonest counts too: it may be the only save, at the end
    of a run, which somebody waits for.
    """
    choices = list(_sequence(raw_bytes, costs, upload_s, threads))
    if interval_s is not None:
        in_time = [choice for choice in choices if choice.durable_s <= INTERVAL_SHARE * interval_s]
        if in_time:
            return in_time[-1]
    return min(choices, key=lambda choice: (choice.durable_s, choice.stored_bytes))


def _sequence(raw_bytes: Mapping[str, float], costs: CostTable, upload_s: float, threads: float) -> Iterable[Choice]:
    codings: dict[str, Coding] = {}
    seconds = stored = 0.0
    steps: list[list[_Step]] = []
    for dtype, count in raw_bytes.items():
        points = _worthwhile(costs[dtype])
        codings[dtype], (each, left) = points[0]
        seconds += count * each
        stored += count * left
        steps.append([_step(dtype, count, before, after) for before, after in pairwise(points)])
    yield Choice(dict(codings), seconds / threads, stored * upload_s, stored)
    # Merged rather than sorted: the steps of one element type stay in their order.
    for step in heapq.merge(*steps, key=lambda step: -step.gain):
        codings[step.dtype] = step.coding
        seconds += step.seconds
        stored -= step.saved
        yield Choice(dict(codings), seconds / threads, stored * upload_s, stored)


def _worthwhile(costs: Mapping[Coding, CodingCost]) -> list[tuple[Coding, CodingCost]]:
    """From the soonest encoded to the smallest; those that cost more without saving much are left out."""
    left: list[tuple[Coding, CodingCost]] = []
    for coding, cost in sorted(costs.items(), key=lambda item: item[1]):
        if not left or left[-1][1].stored - cost.stored >= WORTH_SAVING:
            left.append((coding, cost))
    return left


def _step(dtype: str, count: float, before: tuple[Coding, CodingCost], after: tuple[Coding, CodingCost]) -> _Step:
    (_, old), (coding, new) = before, after
    seconds, saved = new.seconds - old.seconds, old.stored - new.stored
    return _Step(saved / seconds if seconds else math.inf, dtype, coding, count * seconds, count * saved)
