"""Prunes, planned from the store and never from the index, so that a stale index cannot cause deletions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ckptd.metrics import Metrics
from ckptd.services.store_sync import StoreSync
from ckptstore.clock import Clock
from ckptstore.commits.catalog import Checkpoint
from ckptstore.operator import StoreOperator
from ckptstore.retention.pruning import Prune, PrunePlan
from ckptstore.stores import Store


class Pruning:
    """Prunes, and counts the removed checkpoints. Any thread may call any method."""

    def __init__(
        self,
        store: Store,
        store_sync: StoreSync,
        metrics: Metrics,
        clock: Clock,
        on_pruned: Callable[[Sequence[Checkpoint]], None],
    ) -> None:
        """on_pruned: called with the checkpoints that a prune removed."""
        self._on_pruned = on_pruned
        self._store = store
        self._store_sync = store_sync
        self._metrics = metrics
        self._clock = clock

    def prune(self, prune: Prune, dry_run: bool, by: str) -> PrunePlan:
        """Plan, and without dry_run hide; removed checkpoints are gone from all listings on return.

        by: the caller, for the audit log. Raises the errors of Operator.prune.
        """
        plan = self._operator(by).plan_prune(prune)
        return plan if dry_run else self.apply(prune, plan, by)

    def apply(self, prune: Prune, plan: PrunePlan, by: str) -> PrunePlan:
        """Hide the checkpoints that the plan removes. Raises the errors of Operator.prune."""
        if not plan.remove:
            return plan
        done = self._operator(by).prune(prune, plan)
        self._metrics.prune_deleted.inc(len(done.remove))
        self._metrics.prune_freed_bytes.inc(done.freed_bytes)
        self._on_pruned(done.remove)
        return done

    def _operator(self, by: str) -> StoreOperator:
        return StoreOperator(self._store, self._clock, by, self._store_sync.sync_run)
