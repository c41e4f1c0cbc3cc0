"""Chooses the coding of each element type for one save: a pure function of measured costs.

A save is durable when its chunks are encoded and uploaded. Both run concurrently, so the slower one counts. The choice
begins with the fastest codings and replaces them by smaller ones, in the order of bytes saved per second of encoding.
This gives one sequence of choices, each slower to encode and smaller than the last. It ends where encoding costs
training more than it gains. The interval between saves decides which one is used.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from ckptstore.codecs.chunk_codecs import Coding

INTERVAL_SHARE = 0.5
"""A save should be durable within this fraction of the interval between saves."""
WORTH_SAVING = 0.01
"""A slower coding must save at least this fraction of the bytes."""
GAIN = 2.0
"""Seconds of upload that must be saved for each second that training loses to encoding."""
NEGLIGIBLE = 0.001
"""Training may lose this fraction of the interval to encoding, whatever it gains."""


class CodingCost(NamedTuple):
    """The cost of one raw byte of an element type in one coding."""

    seconds: float
    """Seconds for one thread to encode and hash it."""
    stored: float
    """Stored bytes."""


CostTable = Mapping[str, Mapping[Coding, CodingCost]]
"""Costs by element type and coding; holds every coding that may be chosen."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The coding of each element type, and the expected duration and size of the save."""

    codings: Mapping[str, Coding]
    encode_s: float
    upload_s: float
    stored_bytes: float
    seconds: float
    """Time of one thread to encode it."""
    spares: bool = False
    """A smaller choice would have cost training more than it gains."""

    @property
    def durable_s(self) -> float:
        """Seconds until everything is encoded and uploaded."""
        return max(self.encode_s, self.upload_s)


class _Step(NamedTuple):
    """The change from one coding to a smaller one, for all bytes of an element type."""

    gain: float
    """Bytes saved per second of encoding."""
    dtype: str
    coding: Coding
    seconds: float
    saved: float


def choose(
    raw_bytes: Mapping[str, float],
    costs: CostTable,
    upload_s: float,
    threads: float,
    interval_s: float | None,
    price: float = 0.0,
) -> Choice:
    """The smallest choice that is durable within INTERVAL_SHARE of the interval; otherwise the soonest durable one.

    raw_bytes: by element type. upload_s: seconds per stored byte. threads: the number of encoding threads. interval_s:
    from save to save; None if it is unknown. Then the soonest durable choice is used too: it may be the only save, at
    the end of a run, and the user may be waiting for it. price: seconds that training loses for each second that one
    thread encodes; choices that lose it more than they gain are left out.
    """
    choices = list(_sequence(raw_bytes, costs, upload_s, threads))
    fastest, negligible_s = choices[0], NEGLIGIBLE * (interval_s or 0.0)

    def is_worth_it(choice: Choice) -> bool:
        gained_s = (fastest.upload_s - choice.upload_s) / GAIN
        return price * (choice.seconds - fastest.seconds) <= max(negligible_s, gained_s)

    chosen = _in_time(list(filter(is_worth_it, choices)), interval_s)
    return replace(chosen, spares=chosen.codings != _in_time(choices, interval_s).codings)


def _in_time(choices: Sequence[Choice], interval_s: float | None) -> Choice:
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
    yield Choice(dict(codings), seconds / threads, stored * upload_s, stored, seconds)
    # Merged, not sorted, so that the steps of one element type stay in order.
    for step in heapq.merge(*steps, key=lambda step: -step.gain):
        codings[step.dtype] = step.coding
        seconds += step.seconds
        stored -= step.saved
        yield Choice(dict(codings), seconds / threads, stored * upload_s, stored, seconds)


def _worthwhile(costs: Mapping[Coding, CodingCost]) -> list[tuple[Coding, CodingCost]]:
    """The codings from the fastest to the smallest, without those that save less than WORTH_SAVING."""
    left: list[tuple[Coding, CodingCost]] = []
    for coding, cost in sorted(costs.items(), key=lambda item: item[1]):
        if not left or left[-1][1].stored - cost.stored >= WORTH_SAVING:
            left.append((coding, cost))
    return left


def _step(dtype: str, count: float, before: tuple[Coding, CodingCost], after: tuple[Coding, CodingCost]) -> _Step:
    (_, old), (coding, new) = before, after
    seconds, saved = new.seconds - old.seconds, old.stored - new.stored
    return _Step(saved / seconds if seconds else math.inf, dtype, coding, count * seconds, count * saved)
