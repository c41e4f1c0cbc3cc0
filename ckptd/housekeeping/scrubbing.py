"""Verifies stored checkpoints at a limited rate, least recently verified first. Only the leader does this."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ckptd.metrics import Metrics
from ckptd.services.store_sync import StoreSync
from ckptstore.clock import Clock
from ckptstore.commits.catalog import Checkpoint, list_runs
from ckptstore.errors import CkptError, LeadershipLost
from ckptstore.reading.verify import VerifiedChunks
from ckptstore.retention.scrubbing import due_for_scrub, due_newest, rate_limiter, scrub
from ckptstore.run import Run, identity
from ckptstore.stores import Store

_LOG = logging.getLogger(__name__)
_LIST_AGAIN_S = 3600.0
_LIST_NEWEST_S = 600.0
_NEVER_S = 30 * 24 * 3600.0


@dataclass
class Scrubber:
    """Verifies one checkpoint per round and records the result in the store. For one background thread."""

    _store: Store
    _store_sync: StoreSync
    _metrics: Metrics
    _clock: Clock
    _every_s: float
    """A checkpoint is due this long after it last passed verification; 0 disables scrubbing."""
    _bytes_per_s: float
    _newest_s: float
    """A run's newest checkpoint is due before others, this long after the run's last verification; 0: like all others.
    The same one is verified again after `_every_s`; 0: 30 days."""
    _ranks: Sequence[int]
    """The newest one must restore on so many ranks."""

    def __post_init__(self) -> None:
        self._throttle = rate_limiter(self._bytes_per_s, self._clock)
        self._newest: deque[Checkpoint] = deque()
        self._queue: deque[Checkpoint] = deque()
        self._checked = VerifiedChunks()
        self._listed_at = self._newest_listed_at = float("-inf")

    def run_once(self) -> None:
        """Verify the checkpoint that is most overdue. A failure is retried. Raises LeadershipLost."""
        try:
            self._list_newest()
            if self._newest:
                self._scrub(self._newest.popleft(), self._ranks)
                self._queue.clear()  # what was verified is not due any more
                self._listed_at = float("-inf")
                return
            self._list_all()
            if self._queue:
                self._scrub(self._queue.popleft(), None)
        except LeadershipLost:
            self._list_again()
            raise
        except CkptError as error:
            _LOG.warning("cannot scrub: %s", error)
            self._metrics.store_errors.labels("scrub", error.code).inc()

    def _scrub(self, checkpoint: Checkpoint, ranks: Sequence[int] | None) -> None:
        by = f"ckptd {identity()}"
        for found in scrub(
            self._store, [checkpoint], by, self._clock, throttle=self._throttle, checked=self._checked, ranks=ranks
        ):
            self._metrics.scrubbed.inc()
            self._metrics.scrubbed_bytes.inc(found.stored_bytes)
            for one in found.estimates:
                _LOG.info("%s restores on %d ranks in %s s", checkpoint.id, one.ranks, one.restore_s)
            if not found.ok:
                self._metrics.scrub_corrupt.inc()
                _LOG.error("%s is damaged: %s", found.checkpoint.id, "; ".join(found.problems[:5]))
                # Now, not at the next listing: readers must not receive it any more.
                self._store_sync.sync_run(found.checkpoint.run)
                self._list_again()  # the newest one is now the one before

    def _list_newest(self) -> None:
        now = self._clock()
        if not self._newest_s or self._newest or now - self._newest_listed_at < min(_LIST_NEWEST_S, self._newest_s):
            return
        again_s = max(self._every_s or _NEVER_S, self._newest_s)
        due = (due_newest(run, self._newest_s, again_s) for run in self._runs())
        self._newest.extend(checkpoint for checkpoint in due if checkpoint is not None)
        self._newest_listed_at = now

    def _list_all(self) -> None:
        now = self._clock()
        if not self._every_s or self._queue or now - self._listed_at < min(_LIST_AGAIN_S, self._every_s):
            return
        self._checked = VerifiedChunks()
        self._queue.extend(due_for_scrub(self._runs(), now - self._every_s))
        self._listed_at = now

    def _runs(self) -> list[Run]:
        return [Run(self._store, name, self._clock) for name in list_runs(self._store)]

    def _list_again(self) -> None:
        self._newest.clear()
        self._queue.clear()
        self._listed_at = self._newest_listed_at = float("-inf")
