"""The only module that reads the wall clock. All others are passed a Clock."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Returns seconds since the epoch; tests pass a clock they control."""


def system_clock() -> float:
    """Wall-clock seconds since the epoch."""
    return time.time()
