"""Doing something again and again: a thread until it is stopped, and which runs it looks at each time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from itertools import count
from zlib import crc32

from ckptstore.clock import Clock
from ckptstore.errors import CkptError

_LOG = logging.getLogger(__name__)
_ASK_AGAIN_S = 0.5
IDLE_AFTER_S = 600.0
IDLE_ROUNDS = 6


class Periodic:
    """Calls `work` at once and then `every_s` seconds after it last ended. An error is logged; the next call comes.

    when: a call that is due waits until this says yes.
    """

    def __init__(
        self, name: str, work: Callable[[], None], every_s: float, when: Callable[[], bool] = lambda: True
    ) -> None:
        self._work = work
        self._every_s = every_s
        self._when = when
        self._stop = threading.Event()
        # A daemon thread: a store that never answers must not keep the process from ending.
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Ask the thread to end, and wait for it no longer than `timeout_s`. Cut short, it has broken nothing."""
        self._stop.set()
        self._thread.join(timeout_s)

    def _loop(self) -> None:
        while not self._stop.is_set():
            if not self._when():
                self._stop.wait(min(self._every_s, _ASK_AGAIN_S))
                continue
            try:
                self._work()
            except CkptError as error:
                _LOG.warning("%s failed: %s", self._thread.name, error)
            except Exception:
                _LOG.exception("%s failed", self._thread.name)
            self._stop.wait(self._every_s)


class Pace:
    """Which runs a round looks at: those that changed within ten minutes, and each sixth time the others.

    For one thread. A listing costs time and money: thousands of runs that ended must not slow down those that go on.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rounds = count()
        self._changed: dict[str, tuple[int, float]] = {}

    def due(self, versions: Mapping[str, int]) -> list[str]:
        """Of all runs, given with their versions, those of this round. A run seen for the first time is due."""
        now = self._clock()
        number = next(self._rounds)
        self._changed = {
            run: before if (before := self._changed.get(run)) and before[0] == version else (version, now)
            for run, version in versions.items()
        }
        return [
            run
            for run, (_, changed_at) in self._changed.items()
            if now - changed_at < IDLE_AFTER_S or (number + crc32(run.encode())) % IDLE_ROUNDS == 0
        ]
