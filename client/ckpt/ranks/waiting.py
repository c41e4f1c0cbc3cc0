"""Waits for other ranks: after ten seconds one log line names the ranks that have not come.

Ranks that have come are known by keys in the store of the group. A wait in a collective has no such keys: a thread
sets one for this rank when the wait takes longer than two seconds.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ckptstore.errors import RankLost

logger = logging.getLogger(__name__)

NOTICE_S = 10.0
"""A wait for other ranks is logged after this time."""
_HERE_S = 2.0
_NAMED = 8


def log_wait(rank: int, awaited: str) -> None:
    """Log for which ranks a rank waits."""
    message = "rank %d has waited %.0f s for %s; all ranks must make the same calls of ckpt"
    logger.warning(message, rank, NOTICE_S, awaited)


def absent(exist: Callable[..., bool], keys: Sequence[str]) -> list[int]:
    """Indices of keys that do not exist, at most a few, found in few requests. exist: whether all of some keys do."""
    found: list[int] = []
    todo = [range(len(keys))]
    while todo and len(found) < _NAMED:
        part = todo.pop()
        if exist(*(keys[i] for i in part)):
            continue
        if len(part) == 1:
            found.append(part[0])
        else:
            todo += [part[len(part) // 2 :], part[: len(part) // 2]]
    return found


class CollectiveWatch:
    """Watches the collectives of one restore from a thread of its own. `under_way` is for one thread."""

    def __init__(self, here: Callable[[int], None], late: Callable[[int], None]) -> None:
        """here: publish that this rank waits in collective n. late: log the ranks that do not. For the thread."""
        self._here, self._late = here, late
        self._changed = threading.Condition()
        self._number: int | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="ckpt-notice", daemon=True)

    @contextmanager
    def watching(self) -> Iterator[CollectiveWatch]:
        """The thread runs during the block."""
        self._thread.start()
        try:
            yield self
        finally:
            self._set(None, closed=True)
            self._thread.join(_HERE_S)  # it may hang in a store that is gone

    @contextmanager
    def under_way(self, number: int) -> Iterator[None]:
        """The block is the collective of this number, counted alike on all ranks."""
        self._set(number)
        try:
            yield
        finally:
            self._set(None)

    def _set(self, number: int | None, closed: bool = False) -> None:
        with self._changed:
            self._number, self._closed = number, closed
            self._changed.notify()

    def _run(self) -> None:
        try:
            while (number := self._next()) is not None:
                if self._lasts(number, _HERE_S):
                    self._here(number)
                    if self._lasts(number, NOTICE_S - _HERE_S):
                        self._late(number)
                        self._lasts(number, None)
        except RankLost:
            logger.debug("the store of the process group is gone", exc_info=True)

    def _next(self) -> int | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._number is not None)
            return None if self._closed else self._number

    def _lasts(self, number: int, seconds: float | None) -> bool:
        """Whether the collective is still under way after this time."""
        with self._changed:
            return not self._changed.wait_for(lambda: self._closed or self._number != number, seconds)
