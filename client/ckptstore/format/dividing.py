"""Dividing work among threads: each goes through a stretch of its own, front to back."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Stretches(Generic[_T]):
    """Items in order, for several threads. Disks and kernels like readers that go straight on.

    Who has done his own stretch takes over the back half of the longest that is left.
    """

    def __init__(self, items: Sequence[_T], threads: int) -> None:
        cuts = [len(items) * thread // threads for thread in range(threads + 1)]
        self._rest = [deque(items[cuts[thread] : cuts[thread + 1]]) for thread in range(threads)]
        self._lock = threading.Lock()

    def take(self, thread: int) -> _T | None:
        """The next item for this thread; None if all are taken."""
        with self._lock:
            own = self._rest[thread]
            if not own:
                longest = max(self._rest, key=len)
                own.extendleft(longest.pop() for _ in range((len(longest) + 1) // 2))
            return own.popleft() if own else None
