"""Whether the index is fresh enough to answer. "No checkpoint" is only reported if the store was listed recently.

A trainer that receives "no checkpoint" starts from scratch, so absence must never be concluded from a store that
did not answer.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping

from ckptstore.clock import Clock
from ckptstore.errors import CkptError, Damaged, IndexUnavailable, StoreUnavailable


class Freshness:
    """Results of the last listings of the store. Any thread may call any method."""

    def __init__(self, clock: Clock, stale_after_s: float) -> None:
        self._clock = clock
        self._stale_after_s = stale_after_s
        self._lock = threading.Lock()
        self._started_at = clock()
        self._succeeded_at: float | None = None
        self._listed_at: float | None = None
        self._synced: set[str] = set()
        self._failures: dict[str | None, CkptError] = {}

    def report(self, began_at: float, runs: Collection[str], failures: Mapping[str, CkptError]) -> None:
        """Record a round that began at `began_at` and listed the store; some runs may have failed."""
        with self._lock:
            self._listed_at = began_at
            self._synced = (self._synced & set(runs)) | (set(runs) - failures.keys())
            self._failures = dict(failures.items())
            if not failures:
                self._succeeded_at = began_at

    def report_failure(self, error: CkptError) -> None:
        """Record a round that could not list the runs."""
        with self._lock:
            self._failures = {None: error}

    def lag_s(self) -> float:
        """Seconds since the index was last known to equal the store, or since the start."""
        with self._lock:
            return max(0.0, self._clock() - (self._succeeded_at or self._started_at))

    def problem(self) -> str:
        """Why the index does not equal the store now; empty if it does."""
        with self._lock:
            doubt = self._doubt(None, found=False)
        return doubt.message if doubt else ""

    def check(self, run: str | None, found: bool) -> None:
        """Raise if the index cannot answer a query for `run` (None: for all runs).

        found: whether the index has a result. A result is valid once the run has been read completely. An empty
        result is valid only if the last listing succeeded, and recently. Raises StoreUnavailable, or an error that a
        retry cannot fix, such as UnsupportedFormat: skipping an unreadable checkpoint would resume from the wrong step.
        """
        with self._lock:
            doubt = self._doubt(run, found)
        if doubt is not None:
            kind = type(doubt) if isinstance(doubt, Damaged | IndexUnavailable | StoreUnavailable) else StoreUnavailable
            raise kind(doubt.message, doubt.hint or "The index may be stale: wait until GET /readyz reports ready")

    def _doubt(self, run: str | None, found: bool) -> CkptError | None:
        failures = {name: error for name, error in self._failures.items() if run is None or name in (None, run)}
        for name, error in failures.items():
            once_read = self._listed_at is not None and (name is None or name in self._synced)
            if isinstance(error, Damaged) or not (found and once_read):
                return error
        if self._listed_at is None:
            return StoreUnavailable("the store has not been listed yet")
        age = self._clock() - self._listed_at
        if age > self._stale_after_s and not found:
            return StoreUnavailable(f"the store was last listed {age:.0f} s ago")
        return None
