"""What operators decide about checkpoints: pins, labels, deletions that can be undone, policies; and the audit log."""

from __future__ import annotations

from ckptapi.bodies import PoliciesRequest
from ckptd.services.catalog import Catalog
from ckptd.services.synchronizing import Synchronizing
from ckptstore.clock import Clock
from ckptstore.commits.catalog import Checkpoint
from ckptstore.commits.labels import LabelChange
from ckptstore.names import Reference
from ckptstore.operator import StoreOperator
from ckptstore.retention.pins import NamedPin
from ckptstore.retention.policy import PoliciesInForce
from ckptstore.retention.tombstones import SWEEP_GRACE_S
from ckptstore.stores import Store


class Retention:
    """Finds checkpoints in the index, changes the store, then the index. Any thread may call any method."""

    def __init__(self, store: Store, catalog: Catalog, synchronizing: Synchronizing, clock: Clock) -> None:
        self._store = store
        self._catalog = catalog
        self._synchronizing = synchronizing
        self._clock = clock

    def operator(self, by: str = "") -> StoreOperator:
        """The operator that acts for a caller. A run that it changes is up to date in the index on return."""
        return StoreOperator(self._store, self._clock, by, self._synchronizing.sync_run, check_deletes=False)

    def delete(self, reference: Reference, by: str, reason: str, grace_s: float | None) -> None:
        """Hide a checkpoint, to be deleted after a grace. Raises NoCheckpoint or CheckpointHeld."""
        found = self._catalog.find(reference)
        self.operator(by).delete(found, SWEEP_GRACE_S if grace_s is None else grace_s, reason)

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
        """Remove a pin; one that is gone already is fine. Raises InvalidName or NoCheckpoint."""
        self.operator(by).unpin(self._catalog.find(reference), name)

    def label(self, reference: Reference, change: LabelChange, by: str, reason: str) -> Checkpoint:
        """Change tags and metrics; durable and indexed on return. Raises InvalidRequest or NoCheckpoint."""
        found = self._catalog.find(reference)
        self.operator(by).label(found, change, reason)
        return self._catalog.find(_exactly(found))

    def change_policies(self, request: PoliciesRequest, by: str) -> PoliciesInForce:
        """Put policies in force; durable on return, applied within seconds. Raises InvalidPolicy or PoliciesChanged."""
        return self.operator(by).change_policies(request.policies, request.expected, request.reason)


def _exactly(checkpoint: Checkpoint) -> Reference:
    return Reference(checkpoint.run, checkpoint.step, checkpoint.attempt.ulid)
