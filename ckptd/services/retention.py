"""Operations on checkpoints: pins, labels, reversible deletions, policies, and leases for readers."""

from __future__ import annotations

from ckptapi.bodies import PoliciesRequest
from ckptd.services.catalog import Catalog
from ckptd.services.store_sync import StoreSync
from ckptstore.clock import Clock
from ckptstore.commits.catalog import Checkpoint
from ckptstore.commits.labels import LabelChange
from ckptstore.commits.leases import release_lease, take_lease
from ckptstore.errors import InvalidRequest
from ckptstore.names import Reference, check_run
from ckptstore.operator import StoreOperator
from ckptstore.retention.deletion import SWEEP_GRACE_S
from ckptstore.retention.pins import NamedPin
from ckptstore.retention.policy import PoliciesInForce
from ckptstore.run import Run
from ckptstore.stores import Store

_MAX_TTL_S = 7 * 24 * 3600.0
_MAX_HOLDER = 256


class Retention:
    """Finds checkpoints in the index, changes the store, then the index. Any thread may call any method."""

    def __init__(self, store: Store, catalog: Catalog, store_sync: StoreSync, clock: Clock) -> None:
        self._store = store
        self._catalog = catalog
        self._store_sync = store_sync
        self._clock = clock

    def operator(self, by: str = "") -> StoreOperator:
        """A store operator that acts for a caller. Runs that it changes are up to date in the index on return."""
        return StoreOperator(self._store, self._clock, by, self._store_sync.sync_run, check_deletes=False)

    def delete(self, reference: Reference, by: str, reason: str, grace_s: float | None, force: bool) -> None:
        """Hide a checkpoint; it is deleted after the grace period.

        force: even if it is the newest one of its run. Raises NoCheckpoint or CheckpointHeld.
        """
        found = self._catalog.find(reference)
        self.operator(by).delete(found, SWEEP_GRACE_S if grace_s is None else grace_s, reason, force)

    def undelete(self, reference: Reference, by: str, reason: str) -> Checkpoint:
        """Undo a deletion; the checkpoint is listed and pinned on return. Raises NoCheckpoint or SweepBegun."""
        found = self.operator(by).undelete(reference, reason)
        return self._catalog.find(_exactly(found))

    def pin(self, reference: Reference, name: str, by: str, reason: str) -> NamedPin:
        """Keep a checkpoint until the pin is removed; durable on return. Raises InvalidName or NoCheckpoint."""
        found = self._catalog.find(reference)
        self.operator(by).pin(found, name, reason)
        return NamedPin(id=found.id, name=name)

    def unpin(self, reference: Reference, name: str, by: str) -> None:
        """Remove a pin. Idempotent. Raises InvalidName or NoCheckpoint."""
        self.operator(by).unpin(self._catalog.find(reference), name)

    def label(self, reference: Reference, change: LabelChange, by: str, reason: str) -> Checkpoint:
        """Change tags and metrics; durable and indexed on return. Raises InvalidRequest or NoCheckpoint."""
        found = self._catalog.find(reference)
        self.operator(by).label(found, change, reason)
        return self._catalog.find(_exactly(found))

    def change_policies(self, request: PoliciesRequest, by: str) -> PoliciesInForce:
        """Put policies in force; durable on return, applied within seconds. Raises InvalidRequest or Conflict."""
        return self.operator(by).change_policies(request.policies, request.expected, request.reason)


def _exactly(checkpoint: Checkpoint) -> Reference:
    return Reference(checkpoint.run, checkpoint.step, checkpoint.attempt.ulid)


class Leases:
    """Protects checkpoints from deletion for readers that have no access to the store."""

    def __init__(self, store: Store, catalog: Catalog, clock: Clock) -> None:
        self._store = store
        self._catalog = catalog
        self._clock = clock

    def take(self, reference: Reference, holder: str, ttl_s: float) -> tuple[str, str]:
        """Protect a checkpoint for `ttl_s` seconds; the lease is durable on return. Returns its run and its id.

        Raises InvalidRequest, or NoCheckpoint if the checkpoint is deleted or being deleted.
        """
        if not 0 < ttl_s <= _MAX_TTL_S:
            raise InvalidRequest(
                f"ttl_s {ttl_s} is not allowed", f"Use at most {_MAX_TTL_S:.0f} seconds, and renew the lease"
            )
        if not 0 < len(holder) <= _MAX_HOLDER:
            raise InvalidRequest("the holder's name is empty or too long", f"Use 1 to {_MAX_HOLDER} characters")
        checkpoint = self._catalog.find(reference)
        lease = take_lease(Run(self._store, checkpoint.run, self._clock), checkpoint.attempt, holder, ttl_s)
        return checkpoint.run, lease

    def release(self, run: str, lease: str) -> None:
        """End a lease. Idempotent."""
        release_lease(Run(self._store, check_run(run)), lease)
