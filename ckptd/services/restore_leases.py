"""Leases of restore sessions: taken at the start, renewed while the session is live, released after its end."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ckptapi.bodies import RestoreState
from ckptd.index import Restore, RestoreIndex
from ckptd.metrics import Metrics
from ckptstore.clock import Clock
from ckptstore.commits.catalog import Checkpoint
from ckptstore.commits.leases import release_lease, renew_lease, take_lease
from ckptstore.errors import CkptError, NoCheckpoint, Unavailable
from ckptstore.run import Run
from ckptstore.stores import Store

_LOG = logging.getLogger(__name__)
_OUTLIVES_S = 600.0
"""How long a lease outlasts the ttl_s of its session, so that a daemon has time to restart."""


class RestoreLeases:
    """Reports only change the index; all work that waits for the store is here."""

    def __init__(
        self, store: Store, index: RestoreIndex, metrics: Metrics, clock: Clock, on_end: Callable[[str], None]
    ) -> None:
        """on_end: called with the id of a session that fails because its lease is lost."""
        self._store = store
        self._index = index
        self._metrics = metrics
        self._clock = clock
        self._on_end = on_end

    def take(self, checkpoint: Checkpoint, id: str, ttl_s: float) -> tuple[str, float]:
        """Protect the checkpoint of a new session. Returns the lease and its expiry time.

        Durable on return. Raises NoCheckpoint if the checkpoint is being deleted, or Unavailable.
        """
        duration = ttl_s + _OUTLIVES_S
        until = self._clock() + duration
        return take_lease(self._run(checkpoint.run), checkpoint.attempt, _holder(id), duration), until

    def release(self, restore: Restore) -> None:
        """Release the lease of a session. Idempotent. Raises Unavailable."""
        if restore.lease is not None:
            release_lease(self._run(restore.run), restore.lease)
            self._index.release(restore.id)

    def run_once(self) -> None:
        """Release the leases of ended sessions and renew those of live ones. Never raises CkptError."""
        for restore in self._index.leased():
            try:
                if restore.live:
                    self._renew(restore)
                else:
                    self.release(restore)
            except CkptError as error:
                _LOG.warning("cannot renew or release the lease of restore %s: %s", restore.id, error)
                if isinstance(error, Unavailable):
                    self._metrics.store_errors.labels("restore", error.code).inc()

    def _run(self, name: str) -> Run:
        return Run(self._store, name, self._clock)

    def _renew(self, restore: Restore) -> None:
        now = self._clock()
        duration = restore.ttl_s + _OUTLIVES_S
        if restore.lease is None or restore.lease_until - now > duration / 2:
            return
        checkpoint, lease = restore.checkpoint, restore.lease
        if now < restore.lease_until:
            renew_lease(self._run(restore.run), lease, checkpoint.attempt, _holder(restore.id), duration)
        else:
            try:
                lease, _ = self.take(checkpoint, restore.id, restore.ttl_s)
            except NoCheckpoint as error:
                problem = f"{error.message}: its lease expired while no daemon was running to renew it"
                self._index.end(restore.id, RestoreState.FAILED, problem, now)
                self._on_end(restore.id)
                return
        if not self._index.renew(restore.id, lease, now + duration):
            # The session has just ended, and its lease may have been released before we renewed it.
            release_lease(self._run(restore.run), lease)


def _holder(id: str) -> str:
    return f"restore {id}"
