"""Reads checkpoints at rest, slowly, those first that nobody has looked at for the longest time. Work of the leader."""

from __future__ import annotations

import logging
import time
from collections import deque

from ckptd.metrics import Metrics
from ckptd.services.store_sync import StoreSync
from ckptstore.clock import Clock
from ckptstore.commits.catalog import Checkpoint, list_runs
from ckptstore.errors import CkptError, LeadershipLost
from ckptstore.reading.verify import Checked
from ckptstore.retention.scrubbing import RateLimiter, due_for_scrub, scrub
from ckptstore.run import Run, identity
from ckptstore.stores import Store

_LOG = logging.getLogger(__name__)
_LOOK_AGAIN_S = 3600.0


class Scrubber:
    """Checks one checkpoint per round; what was found is in the store. For one background thread."""

    def __init__(
        self,
        store: Store,
        store_sync: StoreSync,
        metrics: Metrics,
        clock: Clock,
        every_s: float,
        bytes_per_s: float,
    ) -> None:
        """every_s: a checkpoint is due again so long after it was last found whole; 0: never."""
        self._store = store
        self._store_sync = store_sync
        self._metrics = metrics
        self._clock = clock
        self._every_s = every_s
        self._throttle = RateLimiter(bytes_per_s, clock, time.sleep)
        self._queue: deque[Checkpoint] = deque()
        self._checked = Checked()
        self._looked_at = float("-inf")

    def run_once(self) -> None:
        """Check the checkpoint that is due first. Never raises CkptError: what fails is tried again."""
        if not self._every_s:
            return
        try:
            self._scrub_next()
        except LeadershipLost as error:
            _LOG.warning("leaves the scrub to another daemon: %s", error)
            self._queue.clear()
        except CkptError as error:
            _LOG.warning("cannot scrub: %s", error)
            self._metrics.store_errors.labels("scrub", error.code).inc()

    def _scrub_next(self) -> None:
        now = self._clock()
        if not self._queue and now - self._looked_at >= min(_LOOK_AGAIN_S, self._every_s):
            self._checked = Checked()
            runs = [Run(self._store, name, self._clock) for name in list_runs(self._store)]
            self._queue.extend(due_for_scrub(runs, now - self._every_s))
            self._looked_at = now
        if not self._queue:
            return
        by, checkpoint = f"ckptd {identity()}", self._queue.popleft()
        for found in scrub(self._store, [checkpoint], by, self._clock, throttle=self._throttle, checked=self._checked):
            self._metrics.scrubbed.inc()
            self._metrics.scrubbed_bytes.inc(found.stored_bytes)
            if not found.ok:
                self._metrics.scrub_corrupt.inc()
                _LOG.error("%s is damaged: %s", found.checkpoint.id, "; ".join(found.problems[:5]))
                # Now, not at the next listing: nobody should be given it any more.
                self._store_sync.sync_run(found.checkpoint.run)
