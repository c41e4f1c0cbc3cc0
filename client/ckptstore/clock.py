"""The only module that reads the wall clock. All others are passed a Clock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Returns seconds since the epoch; tests pass a clock they control."""

    def __call__(self) -> float:
        """Now."""


def system_clock() -> float:
    """Wall-clock seconds since the epoch."""
    return time.time()
