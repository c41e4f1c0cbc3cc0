"""The timeline of a run: one row per attempt of the job, with what it did when. Pure; the template draws it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ckptstore import human
from ckptstore.analysis.charts import Tick
from ckptstore.analysis.goodput import Account, AttemptAccount, Spent
from ckptstore.commits.catalog import Checkpoint

MOST_ROWS = 40
_MOST_SAVES = 400
_WIDTH, _LEFT, _RIGHT, _ROW, _BAR, _TOP = 960, 40, 940, 26, 14, 8
_TICKS = 5


class Span(NamedTuple):
    """A bar of a row."""

    x: float
    width: float
    kind: str
    title: str


class SaveMark(NamedTuple):
    """A checkpoint: captured at x, durable `width` later."""

    x: float
    width: float
    title: str


class TimelineRow(NamedTuple):
    """One attempt."""

    number: int
    y: float
    spans: tuple[Span, ...]
    saves: tuple[SaveMark, ...]


class Timeline(NamedTuple):
    """The rows, newest attempt last, and the axis of time."""

    width: int
    height: int
    left: int
    right: int
    bottom: int
    bar: int
    rows: tuple[TimelineRow, ...]
    ticks: tuple[Tick, ...]


def timeline(account: Account, checkpoints: Sequence[Checkpoint]) -> Timeline:
    """The timeline of an account, with the checkpoints that are still there."""
    shown = list(enumerate(account.attempts, start=1))[-MOST_ROWS:]
    begin = shown[0][1].began_at
    span = max(1e-3, account.until - begin)

    def at(moment: float) -> float:
        return round(_LEFT + (_RIGHT - _LEFT) * min(1.0, max(0.0, (moment - begin) / span)), 2)

    rows = []
    for place, (number, one) in enumerate(shown):
        y = _TOP + place * _ROW
        own = [c for c in checkpoints if c.created_at and c.attempt.generation == one.generation][:_MOST_SAVES]
        saves = tuple(
            SaveMark(
                at(c.created_at),
                max(1.5, at(c.committed_at) - at(c.created_at)),
                f"step {c.step:,}, durable after {human.duration(c.save_seconds)}",
            )
            for c in own
        )
        rows.append(TimelineRow(number, y, tuple(_spans(one, at)), saves))
    bottom = _TOP + len(shown) * _ROW
    ticks = tuple(
        Tick(at(begin + span * n / _TICKS), f"{human.duration(span * n / _TICKS)}") for n in range(_TICKS + 1)
    )
    return Timeline(_WIDTH, bottom + 30, _LEFT, _RIGHT, bottom, _BAR, tuple(rows), ticks)


def _spans(one: AttemptAccount, at: Callable[[float], float]) -> list[Span]:
    restored_at = one.trains_at - one.seconds[Spent.RESTORE]
    stall = one.seconds[Spent.STALL] + one.seconds[Spent.SLOWDOWN]
    # Stalls are many and short: they are drawn together, as a share at the end of what was kept.
    parts = [
        (one.began_at, restored_at, Spent.RESTART),
        (restored_at, one.trains_at, Spent.RESTORE),
        (one.trains_at, one.kept_until - stall, Spent.PRODUCTIVE),
        (one.kept_until - stall, one.kept_until, Spent.STALL),
        (one.kept_until, one.ended_at, Spent.LOST),
    ]
    return [
        Span(at(begin), max(0.0, at(end) - at(begin)), kind, f"{kind} {human.duration(end - begin)}")
        for begin, end, kind in parts
        if end > begin
    ]
