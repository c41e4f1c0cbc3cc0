"""Why checkpoints are kept, from the index and a few listings: for display, not for prunes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptstore.commits.catalog import Checkpoint
from ckptstore.format.records import Policy
from ckptstore.names import Attempt
from ckptstore.retention.pins import Holds, active_holds
from ckptstore.retention.policy import KeepDecision, evaluate, policy_for, read_policies
from ckptstore.retention.pruning import PrunePlan
from ckptstore.retention.scrubbing import verified_at
from ckptstore.run import Run


@dataclass(frozen=True, slots=True)
class RetentionView:
    """Policy, holds and verifications of one run, read from the store."""

    policy: Policy | None
    """The policy in force for the run; None if the run is never pruned."""
    holds: Holds
    verified: Mapping[Attempt, float]
    """When each attempt last passed verification, by the store's clock."""
    now: float
    max_delete_fraction: float

    def blocked(self, run: str, checkpoints: Sequence[Checkpoint]) -> str:
        """Why the policy is not applied: it would delete too many checkpoints of the run. Empty if it is."""
        if self.policy is None:
            return ""
        decisions = tuple(self.evaluate(checkpoints, self.policy))
        return PrunePlan(decisions, (run,), max_delete_fraction=self.max_delete_fraction).blocked

    def evaluate(self, checkpoints: Sequence[Checkpoint], policy: Policy) -> list[KeepDecision]:
        """The decisions that a prune would make about these checkpoints of the run."""
        newest = max((c.attempt for c in checkpoints if c.attempt in self.verified), default=None)
        return evaluate(policy, checkpoints, self.holds, self.now, newest)

    def reasons(self, checkpoints: Sequence[Checkpoint]) -> dict[Attempt, tuple[str, ...]]:
        """The reasons to keep each checkpoint; without a policy, its holds."""
        if self.policy is None:
            return {c.attempt: tuple(self.holds.get(c.attempt, ())) for c in checkpoints}
        return {decision.checkpoint.attempt: decision.reasons for decision in self.evaluate(checkpoints, self.policy)}


def retention_view(run: Run) -> RetentionView:
    """The view of one run; takes a few listings. Raises Damaged or Unavailable."""
    in_force = read_policies(run.store)
    return RetentionView(
        policy=policy_for(in_force.policies, run.name) if in_force is not None else None,
        holds=active_holds(run),
        verified=verified_at(run),
        now=run.clock(),
        max_delete_fraction=in_force.policies.max_delete_fraction if in_force is not None else 1.0,
    )
