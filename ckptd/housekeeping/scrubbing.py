"""Verifies stored checkpoints at a limited rate, least recently verified first. Only the leader does this."""

from __future__ import annotations

import logging
import time
from collections import deque

from ckptd.housekeeping.drilling import Driller
from ckptd.metrics import Metrics
from ckptd.services.store_sync import StoreSync
from ckptstore.clock import Clock
from ckptstore.commits.catalog import Checkpoint, list_runs
from ckptstore.errors import CkptError, LeadershipLost
from ckptstore.reading.verify import VerifiedChunks
from ckptstore.retention.scrubbing import RateLimiter, due_for_scrub, scrub
from ckptstore.run import Run, identity
from ckptstore.stores import Store

_LOG = logging.getLogger(__name__)
_LIST_AGAIN_S = 3600.0


class Scrubber:
    """Verifies one checkpoint per round and records the result in the store. For one background thread."""

    def __init__(
        self,
        store: Store,
        store_sync: StoreSync,
        metrics: Metrics,
        clock: Clock,
        every_s: float,
        bytes_per_s: float,
        driller: Driller,
    ) -> None:
        """every_s: a checkpoint is due this long after it last passed verification; 0 disables scrubbing. driller: its
        drills come first, and count as verifications."""
        self._store = store
        self._store_sync = store_sync
        self._metrics = metrics
        self._clock = clock
        self._every_s = every_s
        self._throttle = RateLimiter(bytes_per_s, clock, time.sleep)
        self._driller = driller
        self._queue: deque[Checkpoint] = deque()
        self._checked = VerifiedChunks()
        self._listed_at = float("-inf")

    def run_once(self) -> None:
        """Drill or verify the checkpoint that is most overdue. Never raises CkptError: a failure is retried."""
        try:
            if self._driller.run_once(self._throttle):
                self._queue.clear()  # what was drilled is not due any more
                self._listed_at = float("-inf")
            elif self._every_s:
                self._scrub_next()
        except LeadershipLost as error:
            _LOG.warning("leaving the scrub to another daemon: %s", error)
            self._queue.clear()
            self._driller.forget()
        except CkptError as error:
            _LOG.warning("cannot scrub: %s", error)
            self._metrics.store_errors.labels("scrub", error.code).inc()

    def _scrub_next(self) -> None:
        now = self._clock()
        if not self._queue and now - self._listed_at >= min(_LIST_AGAIN_S, self._every_s):
            self._checked = VerifiedChunks()
            runs = [Run(self._store, name, self._clock) for name in list_runs(self._store)]
            self._queue.extend(due_for_scrub(runs, now - self._every_s))
            self._listed_at = now
        if not self._queue:
            return
        by, checkpoint = f"ckptd {identity()}", self._queue.popleft()
        for found in scrub(self._store, [checkpoint], by, self._clock, throttle=self._throttle, checked=self._checked):
            self._metrics.scrubbed.inc()
            self._metrics.scrubbed_bytes.inc(found.stored_bytes)
            if not found.ok:
                self._metrics.scrub_corrupt.inc()
                _LOG.error("%s is damaged: %s", found.checkpoint.id, "; ".join(found.problems[:5]))
                # Now, not at the next listing: readers must not receive it any more.
                self._store_sync.sync_run(found.checkpoint.run)
