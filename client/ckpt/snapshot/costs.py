"""Costs: what saves cost a loop, from the times between its calls. StepClock: the step that training has reached and
what saves have cost it, for the heartbeats of rank 0. For the training thread.

The clock is called once per step: with the step from `Schedule.due`, or without it from the hook before
`optim.step()`. Both take microseconds: a few numbers are written to shared memory (saver/heartbeat_writer.py).
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from msgspec.structs import replace

from ckpt.lazily import torch
from ckpt.saver.heartbeat_writer import SharedStep
from ckpt.saver.messages import TrainerStarted
from ckpt.snapshot.handle import SaveHandle
from ckpt.snapshot.writers import SaveWriter
from ckptstore.clock import Clock, system_clock
from ckptstore.format.records import TrainerEnd
from ckptstore.names import new_ulid

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
        """The slowdown of steps during the newest save; None until enough steps of both kinds were seen."""
        if min(len(self._idle), len(self._busy)) < _ENOUGH:
            return None
        return self._busy_ticks * max(0.0, median(self._busy) - median(self._idle))

    def tick(self, now: float, newest: SaveHandle | None) -> None:
        """Count one call of the loop. newest: the save that began last."""
        if not self._ticks:
            self._save, self._since = newest, now
        else:
            if newest is not self._save:
                self._before_s = self.totals
                self._save, self._since = newest, self._last_at
                self._known, self._under_way, self._busy_ticks, self._waited_s = True, True, 0, 0.0
            before_s = self._waited_s
            if self._save is not None and self._under_way:
                self._waited_s = self._save.timings.blocked_s + self._save.timings.held_s
                self._busy_ticks += 1
            own_s = max(0.0, now - self._last_at - (self._waited_s - before_s))
            (self._busy if self._under_way else self._idle).append(own_s)
        self._last_at = now
        self._ticks += 1
        done = self._save is None or self._save.done()
        if self._under_way and done:
            self._durable_s = now - self._since
        self._under_way = not done

    def skip(self, seconds: float) -> None:
        """Do not count this time: the loop waited for saves, which is measured elsewhere."""
        if self._ticks:
            self._last_at += seconds

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


class StepClock:
    """The life of a trainer: from its start, or a restore, to its end or the next restore. For the training thread."""

    _closed_at = 0.0
    """When a Checkpointer of this process was closed last: the time before belongs to its run."""

    def __init__(self, clock: Clock = system_clock) -> None:
        self._newest: SaveHandle | None = None
        self._clock = clock
        self.trackers: dict[str, str] = {}
        """As in `Origin`."""
        self._announced: tuple[SaveWriter, str] | None = None
        self._shared_step: SharedStep | None = None
        self._counted: Callable[[], object] = _nothing
        self._begin(max(process_started_at(), StepClock._closed_at), None, 0, 0.0)

    def _begin(self, began_at: float, parent: str | None, step: int, restored_s: float) -> None:
        now = self._clock()
        self._began = TrainerStarted(
            id=new_ulid(now), parent=parent, began_at=began_at, trains_at=now, restored_s=restored_s
        )  # fmt: skip
        self.close()
        self._costs = Costs()
        self._waited_s = 0.0
        self._step = self._saved_step = step
        self._steps_since = 0
        self._stride = 1.0
        self._named = False
        """`reached` is called, so that steps need not be counted."""
        self._requests = 0
        self._ticks = 0
        self._survived = _last_shown()
        """Training went on after this exception, in a notebook."""

    def restored(self, parent: str | None, step: int, seconds: float) -> None:
        """Training continues from this step. seconds: the duration of the restore, which has just ended; 0: none."""
        now = self._clock()
        began_at = self._began.began_at if seconds and not self._ticks and self._announced is None else now - seconds
        self._begin(began_at, parent, step, seconds)

    def announce(self, writer: SaveWriter) -> None:
        """Send the shared step to a writer that does not have it. Any thread that submits jobs may call it."""
        if self._announced is not None and self._announced == (writer, self._began.id):
            return
        if self._shared_step is None:
            self._shared_step = SharedStep()
            if self._requests:
                self._end_with(TrainerEnd.REQUESTED)  # before the first save
        writer.send(replace(self._began, trackers=self.trackers), self._shared_step.segment)
        self._announced = (writer, self._began.id)

    def close(self) -> None:
        """Close the shared step. A saver that has it reads on; the next announcement creates another."""
        shared_step, self._shared_step = self._shared_step, None
        if shared_step is not None:
            shared_step.close()

    def reached(self, step: int) -> None:
        """The loop has reached a step."""
        self._named = True
        self._step = step
        self._tick()

    def count(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Count the steps of the first one of these optimizers, those of a save."""
        first = next(iter(optimizers), None)
        self._counted = _nothing if first is None else weakref.ref(first)

    def stepping(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step. Steps between saves are counted if nothing names them."""
        if self._named or optimizer is not self._counted():
            return
        self._steps_since += 1
        self._step = self._saved_step + round(self._steps_since * self._stride)
        self._tick()

    def saving(self, handle: SaveHandle) -> None:
        """A save has begun."""
        step, self._newest = handle.step, handle
        if not self._named and self._steps_since and step > self._saved_step:
            self._stride = (step - self._saved_step) / self._steps_since
        self._step = self._saved_step = step
        self._steps_since = 0
        self._survived = _last_shown()
        if self._requests:
            self._requests -= 1
            if not self._requests:
                self._end_with(TrainerEnd.CLOSED)  # the second save since: training went on
        if self._shared_step is not None:
            self._write(self._clock())

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The training thread waits for saves, outside of `save_async` and the gate."""
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            self._waited_s += seconds
            self._costs.skip(seconds)

    def requested(self) -> None:
        """A save was requested: if training ends after it, it was preempted. For any thread and signal handlers."""
        self._requests = 2
        self._end_with(TrainerEnd.REQUESTED)

    def closing(self) -> bool:
        """The Checkpointer is closed. Returns whether that is because of an exception; sys.exit() is none."""
        StepClock._closed_at = system_clock()
        # The second is that of an exception that ends the interpreter.
        error = sys.exc_info()[1] or (None if _last_shown() == self._survived else getattr(sys, "last_value", None))
        failed = error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0))
        if failed:
            self._end_with(TrainerEnd.ERROR)
        return failed

    def _end_with(self, ending: TrainerEnd) -> None:
        if (shared_step := self._shared_step) is not None:
            shared_step.write_expected_end(ending)

    def _tick(self) -> None:
        self._ticks += 1
        self._costs.tick(time.perf_counter(), self._newest)
        if self._shared_step is not None:
            self._write(self._clock())

    def _write(self, now: float) -> None:
        assert self._shared_step is not None
        stalled_s, slowed_s = self._costs.totals
        self._shared_step.write(now, self._step, stalled_s + self._waited_s, slowed_s)


def _last_shown() -> int:
    """The identity of the exception that ended the interpreter, or that an interactive one showed last."""
    return id(getattr(sys, "last_value", None))


def _nothing() -> None:
    """A reference to nothing."""


def process_started_at() -> float:
    """When this process started, in seconds since the epoch; now, where the system does not say."""
    now = system_clock()
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up_s = float(Path("/proc/uptime").read_text().split()[0])
        return now - max(0.0, up_s - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return now
