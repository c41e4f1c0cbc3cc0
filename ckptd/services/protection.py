"""Leases, given on behalf of readers that have no access to the store."""

from __future__ import annotations

from ckptd.services.catalog import Catalog
from ckptstore.clock import Clock
from ckptstore.commits.leases import release_lease, take_lease
from ckptstore.errors import InvalidRequest
from ckptstore.names import Reference, check_run
from ckptstore.run import Run
from ckptstore.stores import Store

MAX_TTL_S = 7 * 24 * 3600.0
_MAX_HOLDER = 256


class Protection:
    """Keeps checkpoints from being deleted while they are read."""

    def __init__(self, store: Store, catalog: Catalog, clock: Clock) -> None:
        self._store = store
        self._catalog = catalog
        self._clock = clock

    def take(self, reference: Reference, holder: str, ttl_s: float) -> tuple[str, str]:
        """Protect a checkpoint for `ttl_s` seconds; the lease is durable on return. Returns its run and its id.

        Raises InvalidRequest, or NoCheckpoint if the checkpoint is gone or going.
        """
        if not 0 < ttl_s <= MAX_TTL_S:
            raise InvalidRequest(f"ttl_s {ttl_s} is not allowed", f"Use up to {MAX_TTL_S:.0f} seconds, and renew")
        if not 0 < len(holder) <= _MAX_HOLDER:
            raise InvalidRequest("the holder's name is empty or too long", f"Use 1 to {_MAX_HOLDER} characters")
        checkpoint = self._catalog.find(reference)
        lease = take_lease(Run(self._store, checkpoint.run, self._clock), checkpoint.attempt, holder, ttl_s)
        return checkpoint.run, lease

    def release(self, run: str, lease: str) -> None:
        """End a lease; one that is gone already is fine."""
        release_lease(Run(self._store, check_run(run)), lease)
