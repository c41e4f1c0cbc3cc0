"""How long writing took, where it goes on in the background."""

from __future__ import annotations

import threading
import time


class BusyTime:
    """Adds up the time in which at least one of the threads that use it as a context was inside."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Of what has ended."""
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
