"""Drills the newest checkpoint of each run: proves that it restores, and estimates how long that takes.

A drill reads the whole checkpoint, and its finding counts as a scrub. So it runs in the thread of the scrub, at its
rate. Only the leader does this.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

from ckptd.metrics import Metrics
from ckptd.services.store_sync import StoreSync
from ckptstore.clock import Clock
from ckptstore.commits.catalog import list_runs
from ckptstore.format.records import Drill
from ckptstore.reading.fetch import Progress
from ckptstore.retention.drilling import drill, due_for_drill
from ckptstore.run import Run, identity
from ckptstore.stores import Store

_LOG = logging.getLogger(__name__)
_LIST_AGAIN_S = 600.0
_NEVER_S = 30 * 24 * 3600.0


class Driller:
    """Drills one checkpoint per round. For the thread of the scrub; `last` is for any thread."""

    def __init__(
        self,
        store: Store,
        store_sync: StoreSync,
        metrics: Metrics,
        clock: Clock,
        every_s: float,
        again_s: float,
        ranks: Sequence[int],
    ) -> None:
        """every_s: seconds between drills of a run that goes on; 0 disables drills. again_s: seconds between drills of
        the same checkpoint; 0: 30 days. ranks: numbers of ranks, in addition to that of the checkpoint."""
        self._store = store
        self._store_sync = store_sync
        self._metrics = metrics
        self._clock = clock
        self._every_s = every_s
        self._again_s = max(again_s or _NEVER_S, every_s)
        self._ranks = ranks
        self._queue: deque[str] = deque()
        self._listed_at = float("-inf")
        self._last: dict[str, Drill] = {}

    def last(self) -> dict[str, Drill]:
        """The last drills by run, as of the last listing."""
        return dict(self._last)

    def forget(self) -> None:
        """Another daemon leads: list the runs again after the lead comes back."""
        self._queue.clear()
        self._listed_at = float("-inf")
        self._last = {}

    def run_once(self, throttle: Progress) -> bool:
        """Drill the next run that is due; False if none is. Raises CkptError."""
        if not self._every_s:
            return False
        now = self._clock()
        if not self._queue and now - self._listed_at >= min(_LIST_AGAIN_S, self._every_s):
            names = list_runs(self._store)
            self._last = {name: found for name, found in self._last.items() if name in names}
            self._queue.extend(names)
            self._listed_at = now
        while self._queue:
            if self._drill_if_due(self._queue.popleft(), throttle):
                return True
        return False

    def _drill_if_due(self, name: str, throttle: Progress) -> bool:
        run = Run(self._store, name, self._clock, f"ckptd {identity()}")
        checkpoint, last = due_for_drill(run, self._every_s, self._again_s)
        if last is not None:
            self._last = {**self._last, name: last}
        done = drill(run, checkpoint, self._ranks, throttle=throttle) if checkpoint is not None else None
        if checkpoint is None or done is None:
            return False
        self._last = {**self._last, name: done}
        self._metrics.drills.inc()
        self._metrics.scrubbed_bytes.inc(done.stored_bytes)
        if done.problems:
            self._metrics.drills_failed.inc()
            _LOG.error("the restore drill of %s failed: %s", checkpoint.id, "; ".join(done.problems[:5]))
            # Now, not at the next listing: readers must not receive it any more. The one before it is drilled next.
            self._store_sync.sync_run(name)
            self._queue.appendleft(name)
        return True
