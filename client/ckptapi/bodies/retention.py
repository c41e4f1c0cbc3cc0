"""What is kept and what is deleted: prunes, policies, pins, and what is known of past deletions."""

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
    """Short for rules with nothing else."""
    rules: Rules | None = None
    """Neither these nor keep_last: the policies in force."""
    run: str | None = None
    """A glob."""
    grace_s: Seconds | None = None
    """Between hiding and deleting. None: as the policies in force say, or a day; 0: gone for good at once."""
    force: bool = False
    """Whatever part of a run goes."""
    dry_run: bool = True


class PruneItem(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint in a prune plan. No reasons: it goes."""

    checkpoint: CheckpointBody
    reasons: list[str]


class PruneBody(msgspec.Struct, frozen=True, kw_only=True):
    """What a prune does or did."""

    dry_run: bool
    items: list[PruneItem]
    freed_bytes: int
    """Stored bytes of those that go; free when the grace is over."""
    held: list[str]
    """Ids of checkpoints that were to go and were spared."""
    grace_s: float = 0.0
    """For so long it can be taken back."""


class PoliciesBody(msgspec.Struct, frozen=True, kw_only=True):
    """One version of the policies; version 0: none were ever set."""

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
    """Put policies in force, in the place of the version they were made from."""

    expected: int
    """That version; 0 for none."""
    policies: PolicySet
    reason: Reason = ""


class PinBody(msgspec.Struct, frozen=True, kw_only=True):
    """One named hold of a checkpoint."""

    id: str
    name: str


class LabelsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to set, and with null what to remove. A metric that is removed is again as it was saved."""

    tags: dict[str, str | None] = {}
    metrics: dict[str, float | None] = {}
    reason: Reason = ""


class AuditBody(msgspec.Struct, frozen=True, kw_only=True):
    """Who set out to do what to which checkpoints, when and why."""

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
    """Take a deletion back."""

    reason: Reason = ""


class PinsBody(msgspec.Struct, frozen=True):
    """Pins of a run."""

    items: list[PinBody]


class DeletedListBody(msgspec.Struct, frozen=True):
    """Deletions of a run that can be taken back."""

    items: list[Deleted]


class AuditListBody(msgspec.Struct, frozen=True):
    """Records of a run, the newest first."""

    items: list[AuditBody]


class PoliciesListBody(msgspec.Struct, frozen=True):
    """Versions of the policies, the newest first."""

    items: list[PoliciesBody]
