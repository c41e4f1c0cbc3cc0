"""What saves cost the training loop, learned from the times at which it asks. No I/O, and no clock of its own.

A save costs what `save_async` and the optimizer's gate held training up, and what steps took longer while it was under
way: the difference of the medians, for so many steps.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from ckpt.saving.handle import SaveHandle

_WINDOW = 64
_ENOUGH = 5  # intervals of a kind, before their median is believed
_DURABLE_SHARE = 0.5  # of the time a save is under way, at most: without the rest there is nothing to compare with
FIRST_AFTER_TICKS = 8
FIRST_AFTER_S = 60.0
"""Only a save tells what one costs: so early comes the first, unless an interval is given."""


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

    @property
    def step_s(self) -> float | None:
        """The usual time from call to call, if that is known."""
        times = self._idle if len(self._idle) >= _ENOUGH else [*self._idle, *self._busy]
        return median(times) if len(times) >= _ENOUGH else None

    @property
    def cost_s(self) -> float:
        """Of the newest save, by now."""
        slower = 0.0
        if min(len(self._idle), len(self._busy)) >= _ENOUGH:
            slower = max(0.0, median(self._busy) - median(self._idle))
        return self._waited_s + self._busy_ticks * slower

    def tick(self, now: float, newest: SaveHandle | None) -> None:
        """The loop has come around. newest: the last save that was begun."""
        if not self._ticks:
            self._last_at = self._since = now
            self._save = newest
        elif newest is not self._save:
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

    def _learn(self, spent_s: float) -> None:
        before = self._waited_s
        if self._save is not None and self._under_way:
            self._waited_s = self._save.timings.blocked_s + self._save.timings.held_s
            self._busy_ticks += 1
        times = self._busy if self._under_way else self._idle
        times.append(max(0.0, spent_s - (self._waited_s - before)))

    def asked(self, now: float) -> None:
        """A save was asked for; the interval to the next one begins."""
        self._since = now

    def may_save(self, now: float, seconds: float | None, overhead: float | None, others_s: float = 0.0) -> bool:
        """Whether it is time for the next save: not while one is under way, nor before the last one is paid for.

        others_s: what it cost another rank, for which this one waits in the next collective.
        """
        if self._under_way:
            return False
        if not self._known and seconds is None:
            return self._ticks > FIRST_AFTER_TICKS or now - self._since >= FIRST_AFTER_S
        paid_s = max(self.cost_s, others_s) / overhead if overhead is not None else 0.0
        return now - self._since >= max(seconds or 0.0, paid_s, self._durable_s / _DURABLE_SHARE)
