"""Retention: prunes, policies, pins, labels, deletions and the audit log."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ckptapi.bodies.checkpoints import CheckpointBody
from ckptstore.format.records import Action, AuditRecord, PoliciesVersion, PolicySet, Rules
from ckptstore.retention.deletion import Deleted

PRUNE = "/v1/prune"
POLICIES = "/v1/policies"
DELETED = "/v1/deleted"
AUDIT = "/v1/audit"
PINS = "/v1/pins"

Seconds = Annotated[float, msgspec.Meta(ge=0, le=365 * 24 * 3600)]
Reason = Annotated[str, msgspec.Meta(max_length=1000)]


class PruneRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Prune one run, some or all."""

    keep_last: int | None = None
    """Short for rules with only keep_last."""
    rules: Rules | None = None
    """Without rules and keep_last, the policies in force apply."""
    run: str | None = None
    """A glob."""
    grace_s: Seconds | None = None
    """Time between hiding and deleting. None: that of the policies in force, or a day; 0: delete at once."""
    force: bool = False
    """Ignore the limit on the fraction of a run that is deleted at once."""
    dry_run: bool = True


class PruneItem(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint in a prune plan. It is removed if there are no reasons to keep it."""

    checkpoint: CheckpointBody
    reasons: list[str]


class PruneBody(msgspec.Struct, frozen=True, kw_only=True):
    """The effect of a prune."""

    dry_run: bool
    items: list[PruneItem]
    freed_bytes: int
    """Stored bytes of the removed checkpoints; freed after the grace."""
    held: list[str]
    """Ids of checkpoints that the policy does not keep, but something held."""
    grace_s: float = 0.0
    """Time during which it can be undeleted."""


class PoliciesBody(msgspec.Struct, frozen=True, kw_only=True):
    """One version of the policies; version 0 if they were never set."""

    version: int
    policies: PolicySet
    by: str = ""
    at: float = 0.0
    reason: str = ""

    @staticmethod
    def of(found: PoliciesVersion | None) -> PoliciesBody:
        """The body for a version."""
        if found is None:
            return PoliciesBody(version=0, policies=PolicySet())
        return PoliciesBody(
            version=found.version, policies=found.policies, by=found.by, at=found.at, reason=found.reason
        )


class PoliciesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Replace the policies."""

    expected: int
    """The version to replace; 0 for none."""
    policies: PolicySet
    reason: Reason = ""


class PinBody(msgspec.Struct, frozen=True, kw_only=True):
    """One pin of a checkpoint."""

    id: str
    name: str


class LabelsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Values to set; null removes one. Removing a metric restores its value from the save."""

    tags: dict[str, str | None] = {}
    metrics: dict[str, float | None] = {}
    reason: Reason = ""


class AuditBody(msgspec.Struct, frozen=True, kw_only=True):
    """An audit record: who started which action on which checkpoints, when and why."""

    run: str
    action: Action
    ids: list[str]
    by: str
    at: float
    reason: str

    @staticmethod
    def of(run: str, record: AuditRecord) -> AuditBody:
        """The body for a record."""
        ids = [f"{run}@{int(step)}.{ulid}" for step, _, ulid in (text.partition("-") for text in record.attempts)]
        return AuditBody(run=run, action=record.action, ids=ids, by=record.by, at=record.at, reason=record.reason)


class UndeleteRequest(msgspec.Struct, frozen=True):
    """Undo a deletion."""

    reason: Reason = ""


class PinsBody(msgspec.Struct, frozen=True):
    """Pins of a run."""

    items: list[PinBody]


class DeletedListBody(msgspec.Struct, frozen=True):
    """Deleted checkpoints of a run that can be undeleted."""

    items: list[Deleted]


class AuditListBody(msgspec.Struct, frozen=True):
    """Audit records of a run, newest first."""

    items: list[AuditBody]


class PoliciesListBody(msgspec.Struct, frozen=True):
    """Versions of the policies, newest first."""

    items: list[PoliciesBody]
