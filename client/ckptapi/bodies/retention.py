"""Retention: prunes, policies, pins, labels, deletions and the audit log."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ckptapi.bodies.checkpoints import CheckpointBody
from ckptstore.commits.audit import AuditEntry
from ckptstore.errors import InvalidRequest
from ckptstore.format.records import Policy, PolicySet
from ckptstore.retention.deletion import Deleted
from ckptstore.retention.pins import NamedPin
from ckptstore.retention.policy import KeepDecision, PoliciesInForce
from ckptstore.retention.pruning import MAX_DELETE_FRACTION, Prune, PrunePlan

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
    rules: Policy | None = None
    """Without rules and keep_last, the policies in force apply."""
    run: str | None = None
    """A glob."""
    grace_s: Seconds | None = None
    """Time between hiding and deleting. None: that of the policies in force, or a day; 0: delete at once."""
    force: bool = False
    """Ignore the limit on the fraction of a run that is deleted at once."""
    dry_run: bool = True

    @staticmethod
    def of(prune: Prune, dry_run: bool) -> PruneRequest:
        """The request for a prune."""
        return PruneRequest(
            rules=prune.policy, run=prune.runs, grace_s=prune.grace_s, force=prune.confirmed, dry_run=dry_run
        )

    def prune(self) -> Prune:
        """The prune that is requested. Raises InvalidRequest."""
        policy = self.rules
        if self.keep_last is not None:
            if policy is not None:
                raise InvalidRequest("both keep_last and rules are set", "Put keep_last into the rules")
            policy = Policy(keep_last=self.keep_last)
        return Prune(policy, self.run, self.grace_s, self.force)


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
