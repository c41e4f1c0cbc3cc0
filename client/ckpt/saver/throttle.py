"""CpuThrottle: keeps the saver from slowing down the training step.

The saver's threads have a lower priority than the trainer's (SCHED_BATCH and niceness, lowest best-effort I/O
priority). With a CPU budget, they sleep while the process has used more than the budget.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import sys
import threading
import time
from collections.abc import Callable

NICENESS = 5
_BURST_S = 1.0
"""Unused budget accumulates for at most this time."""
_SHORTEST_S, _LONGEST_S = 0.001, 1.0

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "ppc64le": 273, "s390x": 282}
_IOPRIO_WHO_PROCESS = 1
_LOWEST_BEST_EFFORT = (2 << 13) | 7


class CpuThrottle:
    """Limits this process to a fraction of one core. wait_for_budget may be called from any thread."""

    def __init__(
        self,
        cpu_budget: float | None,
        cpu: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """cpu_budget: fraction of one core, such as 0.5; None: no limit."""
        self._budget = cpu_budget
        self._cpu, self._clock, self._sleep = cpu, clock, sleep
        self._lock = threading.Lock()
        self._at = clock()
        self._used = cpu()
        self._left_s = 0.0

    def wait_for_budget(self) -> None:
        """Return when the process may use more CPU time; call it before each unit of work."""
        if self._budget is None:
            return
        while (behind := self._behind()) > 0:
            self._sleep(min(max(behind, _SHORTEST_S), _LONGEST_S))  # the limit may be lifted

    def lift(self) -> None:
        """No limit from now on."""
        self._budget = None

    def _behind(self) -> float:
        """Seconds to sleep until CPU time is within the budget; negative if it is."""
        with self._lock:
            if self._budget is None:
                return -math.inf
            now, used = self._clock(), self._cpu()
            self._left_s += self._budget * (now - self._at) - (used - self._used)
            self._left_s = min(self._left_s, self._budget * _BURST_S)
            self._at, self._used = now, used
            return -self._left_s / self._budget


def lower_priority() -> None:
    """Lower the priority of this process and of threads that it starts from now on, as far as the system allows."""
    if hasattr(os, "SCHED_BATCH"):
        try:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        except OSError:
            pass  # niceness alone must do
    os.nice(NICENESS)
    number = _IOPRIO_SET.get(platform.machine())
    if sys.platform == "linux" and number is not None:
        ctypes.CDLL(None).syscall(number, _IOPRIO_WHO_PROCESS, 0, _LOWEST_BEST_EFFORT)
