"""Measures the time of writes in background threads."""

from __future__ import annotations

import threading
import time


class BusyTime:
    """The total time in which at least one thread was inside this context manager."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Total of the periods that have ended."""
        self._lock = threading.Lock()
        self._inside = 0
        self._since = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._since = time.perf_counter()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self.seconds += time.perf_counter() - self._since
