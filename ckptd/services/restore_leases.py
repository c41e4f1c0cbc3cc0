"""The leases of restore sessions: taken when one begins, renewed while it lives, released when it has ended."""

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
"""So much longer than the allowed silence a lease lasts: a daemon that is away may come back."""


class RestoreLeases:
    """Reports only touch the index; what has to wait for the store happens here."""

    def __init__(
        self, store: Store, index: RestoreIndex, metrics: Metrics, clock: Clock, on_end: Callable[[str], None]
    ) -> None:
        """on_end: called with the id of a session that had to be ended."""
        self._store = store
        self._index = index
        self._metrics = metrics
        self._clock = clock
        self._on_end = on_end

    def take(self, checkpoint: Checkpoint, id: str, ttl_s: float) -> tuple[str, float]:
        """Protect the checkpoint of a session that begins. Returns the lease and until when it holds.

        Durable on return. Raises NoCheckpoint if the checkpoint is being deleted, or Unavailable.
        """
        duration = ttl_s + _OUTLIVES_S
        until = self._clock() + duration
        return take_lease(self._run(checkpoint.run), checkpoint.attempt, _holder(id), duration), until

    def release(self, restore: Restore) -> None:
        """Let the checkpoint go; done already is fine. Raises Unavailable."""
        if restore.lease is not None:
            release_lease(self._run(restore.run), restore.lease)
            self._index.release(restore.id)

    def run_once(self) -> None:
        """Release what ended sessions hold, renew what live ones need. Never raises CkptError."""
        for restore in self._index.leased():
            try:
                if restore.live:
                    self._renew(restore)
                else:
                    self.release(restore)
            except CkptError as error:
                _LOG.warning("cannot keep the lease of restore %s: %s", restore.id, error)
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
                problem = f"{error.message}: its lease ran out while no daemon was there to renew it"
                self._index.end(restore.id, RestoreState.FAILED, problem, now)
                self._on_end(restore.id)
                return
        if not self._index.renew(restore.id, lease, now + duration):
            # It ended in this moment, and its lease may have been released before we wrote it again.
            release_lease(self._run(restore.run), lease)


def _holder(id: str) -> str:
    return f"restore {id}"
