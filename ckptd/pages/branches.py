"""The drawing of a run's branches: one row per generation, which begins at the checkpoint it continues from. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from ckptstore.charts import ChartMark, Tick, step_axis
from ckptstore.commits.catalog import Checkpoint, State

MOST_ROWS = 24
_MOST_MARKS = 120
_WIDTH, _LEFT, _RIGHT, _ROW, _TOP, _AXIS = 1088, 74, 1072, 26, 18, 26


@dataclass(frozen=True, slots=True)
class Branch:
    """A generation."""

    number: int
    y: float
    line: str
    """The path of its line."""
    live: bool
    marks: tuple[ChartMark, ...]
    """Its checkpoints; evenly thinned if there are many."""


@dataclass(frozen=True, slots=True)
class Branches:
    """The newest generations, newest last."""

    width: int
    height: int
    left: int
    right: int
    bottom: int
    rows: tuple[Branch, ...]
    ticks: tuple[Tick, ...]
    num_hidden: int


def branches(checkpoints: Sequence[Checkpoint]) -> Branches:
    """The drawing. checkpoints: of one run."""
    by_generation: dict[int, list[Checkpoint]] = defaultdict(list)
    for checkpoint in checkpoints:
        by_generation[checkpoint.attempt.generation].append(checkpoint)
    shown = sorted(by_generation)[-MOST_ROWS:]
    heights = {number: _TOP + place * _ROW for place, number in enumerate(shown)}
    steps = [c.step for number in shown for c in by_generation[number]]
    across, ticks = step_axis(steps, _LEFT, _RIGHT)
    bottom = _TOP + (len(shown) - 1) * _ROW + 16
    ends = {number: max(c.step for c in by_generation[number]) for number in shown}
    for parent in (by_generation[number][0].parent for number in shown):
        if parent is not None and parent.generation in ends:  # the parent itself may be deleted
            ends[parent.generation] = min(max(steps), max(ends[parent.generation], parent.step))
    rows = []
    for number in shown:
        own, y = sorted(by_generation[number], key=lambda c: c.step), heights[number]
        parent = own[0].parent
        start = across(max(min(steps), parent.step)) if parent is not None else across(own[0].step)
        above = heights.get(parent.generation, y) if parent is not None else y
        end = across(ends[number])
        bend = f"C{start},{y} {start},{y} {min(start + _ROW, end)},{y}" if above != y else ""
        line = f"M{start},{above}{bend}H{end}"
        rows.append(Branch(number, y, line, any(c.state is State.COMMITTED for c in own), _marks(own, across, y)))
    return Branches(_WIDTH, bottom + _AXIS, _LEFT, _RIGHT, bottom, tuple(rows), ticks, len(by_generation) - len(shown))


def _marks(own: Sequence[Checkpoint], across: Callable[[float], float], y: float) -> tuple[ChartMark, ...]:
    kept = own[:: -(-len(own) // _MOST_MARKS)]
    return tuple(
        ChartMark(across(c.step), y, f"step {c.step:,} ({c.branch_state})", c.state, f"/checkpoints/{quote(c.id)}")
        for c in kept
    )
