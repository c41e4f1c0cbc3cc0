"""One face for what operators decide about checkpoints, on a store and through a daemon."""

from __future__ import annotations

from itertools import islice
from typing import Protocol

from ckptapi.bodies import AuditBody, PinBody, PoliciesBody, PoliciesRequest
from ckptctl.session import Session
from ckptstore.clock import Clock
from ckptstore.commits import catalog
from ckptstore.commits.audit import operator, read_log
from ckptstore.commits.catalog import Checkpoint
from ckptstore.commits.labels import LabelChange, change_labels, with_labels
from ckptstore.commits.store_check import check_store
from ckptstore.names import Reference, check_run, checkpoint_id
from ckptstore.retention import deletion, pins, policy
from ckptstore.retention.deletion import Deleted, list_deleted, take_back
from ckptstore.run import Run
from ckptstore.stores import Store


class Retention(Protocol):
    """Pins, single deletions, the audit log and policies. DaemonClient is one, and documents what is raised."""

    def delete(self, checkpoint: Checkpoint, grace_s: float, reason: str = "") -> None:
        """Hide a checkpoint, for good after the grace."""

    def undelete(self, reference: Reference, reason: str = "") -> Checkpoint:
        """Take a deletion back, and pin the checkpoint."""

    def deleted(self, run: str) -> list[Deleted]:
        """What can be taken back, by falling step."""

    def pin(self, checkpoint: Checkpoint, name: str, reason: str = "") -> None:
        """Keep a checkpoint until the pin is removed."""

    def unpin(self, checkpoint: Checkpoint, name: str) -> None:
        """Remove a pin."""

    def label(self, checkpoint: Checkpoint, change: LabelChange, reason: str = "") -> Checkpoint:
        """Change tags and metrics."""

    def pins(self, run: str) -> list[PinBody]:
        """All pins of a run, by falling step."""

    def audit(self, run: str, limit: int = 100) -> list[AuditBody]:
        """Who set out to do what, the newest first."""

    def policies(self) -> PoliciesBody:
        """The policies in force."""

    def policies_history(self, limit: int = 100) -> list[PoliciesBody]:
        """Their versions, the newest first."""

    def change_policies(self, request: PoliciesRequest) -> PoliciesBody:
        """Put policies in force."""


def open_retention(session: Session, command: str) -> Retention:
    """The retention of the session's target. command: for what goes wrong with it."""
    if session.target.is_daemon:
        return session.daemon(command)
    return _StoreRetention(session.store(command), session.clock)


class _StoreRetention:
    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    def delete(self, checkpoint: Checkpoint, grace_s: float, reason: str = "") -> None:
        check_store(self._store, self._clock)
        deletion.delete_checkpoint(
            Run(self._store, checkpoint.run, self._clock, operator()), checkpoint.attempt, reason, grace_s
        )

    def undelete(self, reference: Reference, reason: str = "") -> Checkpoint:
        run = Run(self._store, reference.run, self._clock, operator())
        return catalog.find(self._store, take_back(run, reference, reason))

    def deleted(self, run: str) -> list[Deleted]:
        return list_deleted(Run(self._store, check_run(run)))

    def pin(self, checkpoint: Checkpoint, name: str, reason: str = "") -> None:
        pins.pin(Run(self._store, checkpoint.run, self._clock, operator()), checkpoint.attempt, name, reason)

    def unpin(self, checkpoint: Checkpoint, name: str) -> None:
        pins.unpin(Run(self._store, checkpoint.run, self._clock, operator()), checkpoint.attempt, name)

    def label(self, checkpoint: Checkpoint, change: LabelChange, reason: str = "") -> Checkpoint:
        run, attempt = checkpoint.run, checkpoint.attempt
        change_labels(Run(self._store, run, self._clock, operator()), attempt, change, reason)
        return with_labels(
            Run(self._store, run), [catalog.find(self._store, Reference(run, attempt.step, attempt.ulid))]
        )[0]

    def pins(self, run: str) -> list[PinBody]:
        found = sorted(pins.pinned(Run(self._store, check_run(run))).items(), reverse=True)
        return [PinBody(id=checkpoint_id(run, attempt), name=name) for attempt, names in found for name in names]

    def audit(self, run: str, limit: int = 100) -> list[AuditBody]:
        return [AuditBody.of(run, record) for record in islice(read_log(Run(self._store, check_run(run))), limit)]

    def policies(self) -> PoliciesBody:
        return PoliciesBody.of(policy.read_policies(self._store))

    def policies_history(self, limit: int = 100) -> list[PoliciesBody]:
        return [PoliciesBody.of(version) for version in policy.policies_history(self._store, limit)]

    def change_policies(self, request: PoliciesRequest) -> PoliciesBody:
        done = policy.change_policies(
            self._store, request.policies, request.expected, operator(), self._clock, request.reason
        )
        return PoliciesBody.of(done)
