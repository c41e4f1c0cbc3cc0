"""Commits finished attempts whose committer died."""

from __future__ import annotations

from dataclasses import dataclass

from ckptstore.clock import Clock
from ckptstore.commit import receipt_ranks
from ckptstore.deletion import advance, undecided_attempts
from ckptstore.names import Attempt
from ckptstore.stores import Store


@dataclass(slots=True)
class _Seen:
    num_receipts: int
    since: float
    settled: bool = False


class Recovery:
    """Watches attempts that have no outcome yet. For one thread."""

    def __init__(self, store: Store, clock: Clock, grace_s: float) -> None:
        """grace_s: how long no receipt may have been added before we take the committer for dead."""
        self._store = store
        self._clock = clock
        self._grace_s = grace_s
        self._seen: dict[str, dict[Attempt, _Seen]] = {}

    def advance_run(self, run: str) -> list[Attempt]:
        """Commit what is finished and was left alone for the grace; returns what is committed now."""
        undecided = undecided_attempts(self._store, run)
        before = self._seen.get(run, {})
        self._seen[run] = {attempt: self._look(run, attempt, before.get(attempt)) for attempt in undecided}
        return [attempt for attempt, seen in self._seen[run].items() if self._advance(run, attempt, seen)]

    def _look(self, run: str, attempt: Attempt, before: _Seen | None) -> _Seen:
        count = len(receipt_ranks(self._store, run, attempt))
        return before if before and before.num_receipts == count else _Seen(count, self._clock())

    def _advance(self, run: str, attempt: Attempt, seen: _Seen) -> bool:
        if seen.settled or not seen.num_receipts or self._clock() - seen.since < self._grace_s:
            return False
        committed = advance(self._store, run, attempt, self._clock)
        # Not committed means that receipts are missing or damaged: worth another look when there are more.
        seen.settled = True
        return committed
