"""The retention policies in force: shown, changed, and applied after each commit and once an hour.

Applying them is work of the leader. What they delete is hidden first and can be taken back for their grace.
"""

from __future__ import annotations

import logging

from ckptd.index import Index
from ckptd.metrics import Metrics
from ckptd.services.pruning import Pruning
from ckptstore.clock import Clock
from ckptstore.errors import CkptError, LeadershipLost, TooMuchToDelete
from ckptstore.format.records import PoliciesVersion, PolicySet
from ckptstore.names import check_run
from ckptstore.retention.deletion import plan_prune
from ckptstore.retention.policy import Policy, change_policies, policies_history, policy_for, read_policies
from ckptstore.retention.pruning import PrunePlans
from ckptstore.run import Run
from ckptstore.stores import Store

_LOG = logging.getLogger(__name__)
_BY = "ckptd, by the policies"
_EVERY_S = 3600.0


class Policies:
    """Reads and writes policies in the store. `round` is for one background thread, the rest for any."""

    def __init__(self, store: Store, index: Index, pruning: Pruning, metrics: Metrics, clock: Clock) -> None:
        """store, pruning: of the leader, where others may lead; only `round` deletes."""
        self._store = store
        self._index = index
        self._pruning = pruning
        self._metrics = metrics
        self._clock = clock
        self._applied: dict[str, tuple[int, int, float]] = {}
        """Versions of the run in the index and of the policies, and when, that were looked at."""

    def show(self) -> PoliciesVersion | None:
        """The policies in force; None: none were ever set. Raises Damaged or Unavailable."""
        return read_policies(self._store)

    def history(self, limit: int = 100) -> list[PoliciesVersion]:
        """The newest versions, the newest first."""
        return policies_history(self._store, limit)

    def change(self, policies: PolicySet, expected: int, by: str, reason: str = "") -> PoliciesVersion:
        """Put policies in force; durable on return, applied within seconds. Raises InvalidPolicy or PoliciesChanged."""
        return change_policies(self._store, policies, expected, by, self._clock, reason)

    def of_run(self, run: str) -> Policy | None:
        """What counts for a run; None: it is never pruned. Raises InvalidName."""
        found = read_policies(self._store)
        return policy_for(found.policies, check_run(run)) if found is not None else None

    def round(self) -> None:
        """Apply the policies to runs that changed, to all when the policies did, and to each once an hour.

        Never raises CkptError: what fails is tried again.
        """
        try:
            in_force = read_policies(self._store)
            versions = self._index.versions()
        except CkptError as error:
            self._count("all runs", error)
            return
        if in_force is None:
            return
        self._applied = {run: seen for run, seen in self._applied.items() if run in versions}
        for run, version in versions.items():
            if self._is_due(run, version, in_force.version):
                try:
                    self._apply(run, in_force)
                except LeadershipLost as error:
                    _LOG.warning("leaves the policies to another daemon: %s", error)
                    return
                except CkptError as error:
                    self._count(run, error)
                    if not isinstance(error, TooMuchToDelete):
                        continue
                self._applied[run] = (version, in_force.version, self._clock())

    def _is_due(self, run: str, version: int, policies: int) -> bool:
        seen = self._applied.get(run)
        return seen is None or seen[:2] != (version, policies) or self._clock() - seen[2] >= _EVERY_S

    def _apply(self, run: str, in_force: PoliciesVersion) -> None:
        policy = policy_for(in_force.policies, run)
        if policy is None:
            return
        plan = plan_prune(Run(self._store, run, self._clock), policy)
        planned = PrunePlans(
            (plan,),
            in_force.policies.grace_s,
            in_force.policies.max_delete_fraction,
            f"policies, version {in_force.version}",
        )
        spared = self._pruning.apply(planned, _BY)
        if len(plan.remove) > len(spared):
            _LOG.info("hid %d checkpoints of run %s: %s", len(plan.remove) - len(spared), run, planned.reason)

    def _count(self, run: str, error: CkptError) -> None:
        _LOG.warning("cannot apply the policies to %s: %s", run, error)
        self._metrics.policies_failed.labels(error.code).inc()
