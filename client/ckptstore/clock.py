"""The only reader of the wall clock. Everything else is handed a Clock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since the epoch; tests pass a clock they can move."""

    def __call__(self) -> float:
        """Now."""


def system_clock() -> float:
    """Wall-clock seconds since the epoch."""
    return time.time()
