"""Costs: what saves cost a loop, from the times between its calls. For the training thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median

from ckpt.snapshot.handle import SaveHandle

_WINDOW = 64
_ENOUGH = 5  # intervals of a kind, before their median is believed
FIRST_AFTER_TICKS = 8
FIRST_AFTER_S = 60.0
"""The first save is this early, to measure its cost, unless an interval is given."""


class Costs:
    """The times between the calls of one loop."""

    def __init__(self) -> None:
        self._idle: deque[float] = deque(maxlen=_WINDOW)
        self._busy: deque[float] = deque(maxlen=_WINDOW)
        self._ticks = 0
        self._last_at = self._since = 0.0
        self._durable_s = 0.0
        self._save: SaveHandle | None = None
        self._known = self._under_way = False
        self._busy_ticks = 0
        self._waited_s = 0.0
        self._before_s = (0.0, 0.0)

    @property
    def totals(self) -> tuple[float, float]:
        """Seconds that all saves so far held the loop up, and seconds that it ran slower because of them."""
        waited_s, slower_s = self._before_s
        return waited_s + self._waited_s, slower_s + (self.slowdown_s or 0.0)

    @property
    def step_s(self) -> float | None:
        """The usual time from call to call, if that is known."""
        times = self._idle if len(self._idle) >= _ENOUGH else [*self._idle, *self._busy]
        return median(times) if len(times) >= _ENOUGH else None

    @property
    def cost_s(self) -> float:
        """The cost of the newest save so far."""
        return self._waited_s + (self.slowdown_s or 0.0)

    @property
    def slowdown_s(self) -> float | None:
        """What steps took longer during the newest save; None until enough steps of both kinds were seen."""
        if min(len(self._idle), len(self._busy)) < _ENOUGH:
            return None
        return self._busy_ticks * max(0.0, median(self._busy) - median(self._idle))

    def tick(self, now: float, newest: SaveHandle | None) -> None:
        """Count one call of the loop. newest: the save that began last."""
        if not self._ticks:
            self._last_at = self._since = now
            self._save = newest
        elif newest is not self._save:
            self._before_s = self.totals
            self._save, self._since = newest, self._last_at
            self._known, self._under_way, self._busy_ticks, self._waited_s = True, True, 0, 0.0
        spent, self._last_at = now - self._last_at, now
        if self._ticks:
            self._learn(spent)
        self._ticks += 1
        done = self._save is None or self._save.done()
        if self._under_way and done:
            self._durable_s = now - self._since
        self._under_way = not done

    def skip(self, seconds: float) -> None:
        """Do not count this time: the loop waited for saves, which is measured elsewhere."""
        if self._ticks:
            self._last_at += seconds

    def _learn(self, spent_s: float) -> None:
        before = self._waited_s
        if self._save is not None and self._under_way:
            self._waited_s = self._save.timings.blocked_s + self._save.timings.held_s
            self._busy_ticks += 1
        own_s = max(0.0, spent_s - (self._waited_s - before))
        (self._busy if self._under_way else self._idle).append(own_s)

    def asked(self, now: float) -> None:
        """A save is due; the interval to the next one begins."""
        self._since = now

    def may_save(
        self, now: float, seconds: float | None, interval_s: Callable[[float, float], float], others_s: float = 0.0
    ) -> bool:
        """Whether it is time for the next save: not while one is under way, nor before the last one is paid for.

        seconds: an interval that is given. interval_s: the shortest interval by the cost of a save and the time until
        it is durable. others_s: highest cost on another rank, for which this one waits in the next collective.
        """
        if self._under_way:
            return False
        if not self._known and seconds is None:
            return self._ticks > FIRST_AFTER_TICKS or now - self._since >= FIRST_AFTER_S
        return now - self._since >= interval_s(max(self.cost_s, others_s), self._durable_s)
