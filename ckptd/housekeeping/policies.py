"""Applies the retention policies in force after each commit and once an hour.

Only the leader does this. Removed checkpoints are hidden first, and can be restored during the grace period.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

from ckptd.housekeeping.leadership import reported
from ckptd.index import Index
from ckptd.metrics import Metrics
from ckptd.services.events import Events
from ckptstore.clock import Clock
from ckptstore.errors import CkptError, TooMuchToDelete
from ckptstore.format.records import PolicySet
from ckptstore.operator import StoreOperator
from ckptstore.retention.policy import PoliciesInForce, policy_for, read_policies
from ckptstore.retention.pruning import Prune, plan_prune

_LOG = logging.getLogger(__name__)
POLICIES = "ckptd, by the policies"
"""The operator in the audit log."""
_EVERY_S = 3600.0


@dataclass
class PolicyLoop:
    """Applies the policies in the store. For one background thread."""

    _index: Index
    _operator: StoreOperator
    """Writes to a fenced store, so that only the leader can change it."""
    _events: Events
    _metrics: Metrics
    _clock: Clock
    _applied: dict[str, tuple[int, int, float]] = field(default_factory=dict)
    """By run: its version in the index, the version of the policies, and the time when they were last applied."""
    _limited_at: float = float("-inf")

    def run_once(self) -> None:
        """Apply the policies to changed runs, to all runs if the policies changed, and to each run once an hour.

        A run that fails is tried again. Raises LeadershipLost.
        """
        with reported(self._count, "all runs"):
            in_force = read_policies(self._operator.store)
            versions = self._index.versions()
            if not in_force.version:
                return
            self._applied = {run: seen for run, seen in self._applied.items() if run in versions}
            self._apply_limits(in_force.policies)
            for run, version in versions.items():
                if self._is_due(run, version, in_force.version):
                    with reported(self._count, run):
                        self._apply(run, in_force)
                        self._applied[run] = (version, in_force.version, self._clock())

    def _apply_limits(self, policies: PolicySet) -> None:
        """Prune the runs that share a limit, once an hour: it takes a listing of all of them."""
        if self._clock() - self._limited_at < _EVERY_S:
            return
        self._limited_at = self._clock()
        for override in policies.overrides:
            if override.max_bytes and override.rules is not None:
                with reported(self._count, override.runs):
                    done = self._operator.prune(Prune(run=override.runs))
                    self._events.pruned(done.remove)

    def _is_due(self, run: str, version: int, policies: int) -> bool:
        seen = self._applied.get(run)
        return seen is None or seen[:2] != (version, policies) or self._clock() - seen[2] >= _EVERY_S

    def _apply(self, run: str, in_force: PoliciesInForce) -> None:
        policy = policy_for(in_force.policies, run)
        if policy is None:
            return
        plan = replace(
            plan_prune(self._operator.run(run), policy),
            grace_s=in_force.policies.grace_s,
            max_delete_fraction=in_force.policies.max_delete_fraction,
            reason=f"policies, version {in_force.version}",
        )
        try:
            done = self._operator.prune(Prune(policy), plan)
        except TooMuchToDelete as error:
            self._count(run, error)  # a person decides: the same policies remove as much at the next try
            return
        if done.remove:
            self._events.pruned(done.remove)
            _LOG.info("hid %d checkpoints of run %s: %s", len(done.remove), run, plan.reason)

    def _count(self, run: str, error: CkptError) -> None:
        _LOG.warning("cannot apply the policies to %s: %s", run, error)
        self._metrics.policies_failed.labels(error.code).inc()
