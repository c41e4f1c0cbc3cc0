"""Prunes: planned from the store itself, never from the index, so that a stale index cannot delete."""

from __future__ import annotations

from dataclasses import dataclass

from ckptd.metrics import Metrics
from ckptd.services.synchronizing import Synchronizing
from ckptstore.catalog import Checkpoint, list_runs
from ckptstore.clock import Clock
from ckptstore.deletion import PrunePlan, apply_prune, plan_prune
from ckptstore.errors import NoCheckpoint
from ckptstore.retention import Policy, Verdict
from ckptstore.stores import Store


@dataclass(frozen=True, slots=True)
class Pruned:
    """What a prune did, or a dry run would do."""

    verdicts: tuple[Verdict, ...]
    removed: tuple[Checkpoint, ...]
    spared: tuple[Checkpoint, ...]
    """Were to go, but a reader took a lease in between."""


class Pruning:
    """Applies a retention policy to runs."""

    def __init__(self, store: Store, synchronizing: Synchronizing, metrics: Metrics, clock: Clock) -> None:
        self._store = store
        self._synchronizing = synchronizing
        self._metrics = metrics
        self._clock = clock

    def prune(self, policy: Policy, run: str | None, dry_run: bool) -> Pruned:
        """Plan, and without dry_run delete; what was removed is gone from store and index on return.

        Raises NoCheckpoint for a run without checkpoints, or Unavailable: then part of the plan may be done.
        """
        names = [run] if run is not None else list_runs(self._store)
        plans = [plan_prune(self._store, name, policy, self._clock) for name in names]
        if run is not None and not plans[0].verdicts:
            raise NoCheckpoint(f"run {run!r} has no checkpoint in {self._store.url}", "GET /v1/runs shows the runs")
        verdicts = tuple(verdict for plan in plans for verdict in plan.verdicts)
        if dry_run:
            return Pruned(verdicts, tuple(c for plan in plans for c in plan.remove), ())
        spared = [checkpoint for plan in plans for checkpoint in self._apply(plan)]
        removed = [checkpoint for plan in plans for checkpoint in plan.remove if checkpoint not in spared]
        self._metrics.prune_deleted.inc(len(removed))
        self._metrics.prune_freed_bytes.inc(sum(checkpoint.stored_bytes for checkpoint in removed))
        return Pruned(verdicts, tuple(removed), tuple(spared))

    def _apply(self, plan: PrunePlan) -> list[Checkpoint]:
        if not plan.remove:
            return []
        try:
            return apply_prune(self._store, plan, self._clock)
        finally:
            self._synchronizing.sync_run(plan.run)
