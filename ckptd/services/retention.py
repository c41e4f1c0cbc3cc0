"""What operators decide about checkpoints: pins, deletions that can be taken back, policies; and who did what."""

from __future__ import annotations

from itertools import islice

from ckptapi.bodies import AuditBody, PinBody, PoliciesBody, PoliciesRequest
from ckptd.services.catalog import Catalog
from ckptd.services.synchronizing import Synchronizing
from ckptstore.clock import Clock
from ckptstore.commits.audit import read_log
from ckptstore.commits.catalog import Checkpoint
from ckptstore.commits.labels import LabelChange, change_labels
from ckptstore.names import Reference, check_run, checkpoint_id
from ckptstore.retention import pins
from ckptstore.retention.deletion import Deleted, delete_checkpoint, list_deleted, take_back
from ckptstore.retention.policy import change_policies, policies_history, read_policies
from ckptstore.retention.tombstones import SWEEP_GRACE_S
from ckptstore.run import Run
from ckptstore.stores import Store


class Retention:
    """Changes the store, then the index. Any thread may call any method; all raise Unavailable."""

    def __init__(self, store: Store, catalog: Catalog, synchronizing: Synchronizing, clock: Clock) -> None:
        self._store = store
        self._catalog = catalog
        self._synchronizing = synchronizing
        self._clock = clock

    def delete(self, reference: Reference, by: str, reason: str, grace_s: float | None) -> None:
        """Hide a checkpoint, to be deleted after a grace. Raises NoCheckpoint or CheckpointHeld."""
        found = self._catalog.find(reference)
        grace_s = SWEEP_GRACE_S if grace_s is None else grace_s
        try:
            delete_checkpoint(Run(self._store, found.run, self._clock, by), found.attempt, reason, grace_s)
        finally:
            self._synchronizing.sync_run(found.run)

    def undelete(self, reference: Reference, by: str, reason: str) -> Checkpoint:
        """Take a deletion back; the checkpoint is listed and pinned on return. Raises NoCheckpoint or SweepBegun."""
        try:
            found = take_back(Run(self._store, reference.run, self._clock, by), reference, reason)
        finally:
            self._synchronizing.sync_run(reference.run)
        return self._catalog.find(found)

    def deleted(self, run: str) -> list[Deleted]:
        """What is hidden and can be taken back, by falling step. Raises InvalidName."""
        return list_deleted(Run(self._store, check_run(run)))

    def pin(self, reference: Reference, name: str, by: str, reason: str) -> PinBody:
        """Keep a checkpoint until the pin is removed; durable on return. Raises InvalidName or NoCheckpoint."""
        found = self._catalog.find(reference)
        pins.pin(Run(self._store, found.run, self._clock, by), found.attempt, name, reason)
        return PinBody(id=found.id, name=name)

    def unpin(self, reference: Reference, name: str, by: str) -> None:
        """Remove a pin; one that is gone already is fine. Raises InvalidName or NoCheckpoint."""
        found = self._catalog.find(reference)
        pins.unpin(Run(self._store, found.run, self._clock, by), found.attempt, name)

    def label(self, reference: Reference, change: LabelChange, by: str, reason: str) -> Checkpoint:
        """Change tags and metrics; durable and indexed on return. Raises InvalidRequest or NoCheckpoint."""
        found = self._catalog.find(reference)
        change_labels(Run(self._store, found.run, self._clock, by), found.attempt, change, reason)
        self._synchronizing.sync_run(found.run)
        return self._catalog.find(Reference(found.run, found.step, found.attempt.ulid))

    def pins(self, run: str) -> list[PinBody]:
        """All pins of a run, by falling step. Raises InvalidName."""
        found = sorted(pins.pinned(Run(self._store, check_run(run))).items(), reverse=True)
        return [PinBody(id=checkpoint_id(run, attempt), name=name) for attempt, names in found for name in names]

    def audit(self, run: str, limit: int) -> list[AuditBody]:
        """Who set out to do what, the newest first. Raises InvalidName."""
        records = read_log(Run(self._store, check_run(run)), limit)
        return [AuditBody.of(run, record) for record in islice(records, limit)]

    def policies(self) -> PoliciesBody:
        """The policies in force."""
        return PoliciesBody.of(read_policies(self._store))

    def history(self, limit: int) -> list[PoliciesBody]:
        """The newest versions, the newest first."""
        return [PoliciesBody.of(version) for version in policies_history(self._store, limit)]

    def change(self, request: PoliciesRequest, by: str) -> PoliciesBody:
        """Put policies in force; durable on return, applied within seconds. Raises InvalidPolicy or PoliciesChanged."""
        done = change_policies(self._store, request.policies, request.expected, by, self._clock, request.reason)
        return PoliciesBody.of(done)
