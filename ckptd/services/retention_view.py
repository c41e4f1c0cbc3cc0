"""Why checkpoints stay, as far as the index and a few listings tell: for people who look, not for prunes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptstore.clock import Clock
from ckptstore.commits.catalog import Checkpoint
from ckptstore.format.records import Policy
from ckptstore.names import Attempt
from ckptstore.retention.pins import Holds, active_holds
from ckptstore.retention.policy import KeepDecision, evaluate, policy_for, read_policies
from ckptstore.retention.scrubbing import verified_at
from ckptstore.run import Run
from ckptstore.stores import Store


@dataclass(frozen=True, slots=True)
class RetentionView:
    """What the store says about keeping the checkpoints of a run."""

    policy: Policy | None
    """In force for the run; None: it is never pruned."""
    holds: Holds
    verified: Mapping[Attempt, float]
    """When attempts were last found whole, by the store's clock."""
    now: float

    def evaluate(self, checkpoints: Sequence[Checkpoint], policy: Policy) -> list[KeepDecision]:
        """What a policy would do to these checkpoints of the run, the way a prune judges."""
        newest = max((c.attempt for c in checkpoints if c.attempt in self.verified), default=None)
        return evaluate(policy, checkpoints, self.holds, self.now, newest)

    def reasons(self, checkpoints: Sequence[Checkpoint]) -> dict[Attempt, tuple[str, ...]]:
        """Why each of them stays; without a policy, what holds it."""
        if self.policy is None:
            return {c.attempt: tuple(self.holds.get(c.attempt, ())) for c in checkpoints}
        return {verdict.checkpoint.attempt: verdict.reasons for verdict in self.evaluate(checkpoints, self.policy)}


class RetentionViews:
    """Reads policies, holds and findings. Any thread may use it."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    def of_run(self, run: str) -> RetentionView:
        """What is known of one run: a handful of listings. Raises InvalidName, Damaged or Unavailable."""
        named = Run(self._store, run, self._clock)
        in_force = read_policies(self._store)
        return RetentionView(
            policy=policy_for(in_force.policies, run) if in_force is not None else None,
            holds=active_holds(named),
            verified=verified_at(named),
            now=self._clock(),
        )
