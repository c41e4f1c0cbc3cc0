"""Retention: prunes, policies, pins, labels, deletions and the audit log."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ckptapi.bodies.checkpoints import CheckpointBody
from ckptstore.commits.audit import AuditEntry
from ckptstore.format.records import PolicySet
from ckptstore.retention.deletion import Deleted
from ckptstore.retention.pins import NamedPin
from ckptstore.retention.policy import KeepDecision, PoliciesInForce
from ckptstore.retention.pruning import MAX_DELETE_FRACTION, PrunePlan

PRUNE = "/v1/prune"
POLICIES = "/v1/policies"
DELETED = "/v1/deleted"
AUDIT = "/v1/audit"
PINS = "/v1/pins"

Reason = Annotated[str, msgspec.Meta(max_length=1000)]


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
    max_delete_fraction: float = MAX_DELETE_FRACTION
    """The largest fraction of a run that is removed without confirmation."""

    @staticmethod
    def of(plan: PrunePlan, dry_run: bool) -> PruneBody:
        """The body for a plan, before or after it was applied."""
        return PruneBody(
            dry_run=dry_run,
            items=[
                PruneItem(checkpoint=CheckpointBody.of(decision.checkpoint), reasons=list(decision.reasons))
                for decision in plan.decisions
            ],
            freed_bytes=plan.freed_bytes,
            held=[checkpoint.id for checkpoint in plan.held],
            grace_s=plan.grace_s,
            max_delete_fraction=plan.max_delete_fraction,
        )

    def plan(self) -> PrunePlan:
        """The plan that the body describes."""
        decisions = tuple(KeepDecision(item.checkpoint.checkpoint(), tuple(item.reasons)) for item in self.items)
        held = tuple(d.checkpoint for d in decisions if d.checkpoint.id in self.held)
        runs = dict.fromkeys(decision.checkpoint.run for decision in decisions)
        return PrunePlan(decisions, tuple(runs), self.grace_s, self.max_delete_fraction, held=held)


class PoliciesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Replace the policies."""

    expected: int
    """The version to replace; 0 for none."""
    policies: PolicySet
    reason: Reason = ""


class LabelsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Values to set; null removes one. Removing a metric restores its value from the save."""

    tags: dict[str, str | None] = {}
    metrics: dict[str, float | None] = {}
    reason: Reason = ""


class UndeleteRequest(msgspec.Struct, frozen=True):
    """Undo a deletion."""

    reason: Reason = ""


class PinsBody(msgspec.Struct, frozen=True):
    """Pins of a run."""

    items: list[NamedPin]


class DeletedListBody(msgspec.Struct, frozen=True):
    """Deleted checkpoints of a run that can be undeleted."""

    items: list[Deleted]


class AuditListBody(msgspec.Struct, frozen=True):
    """Audit records of a run, newest first."""

    items: list[AuditEntry]


class PoliciesListBody(msgspec.Struct, frozen=True):
    """Versions of the policies, newest first."""

    items: list[PoliciesInForce]
