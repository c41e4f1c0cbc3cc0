"""Prunes: planned from the store itself, never from the index, so that a stale index cannot delete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckptd.metrics import Metrics
from ckptd.services.synchronizing import Synchronizing
from ckptstore.clock import Clock
from ckptstore.commits.catalog import Checkpoint
from ckptstore.retention.policy import Verdict
from ckptstore.retention.pruning import Prune, PrunePlans, apply_prunes, plan_prunes
from ckptstore.stores import Store


@dataclass(frozen=True, slots=True)
class Pruned:
    """What a prune did, or a dry run would do."""

    verdicts: tuple[Verdict, ...]
    removed: tuple[Checkpoint, ...]
    spared: tuple[Checkpoint, ...]
    """Were to go, but something held them by then."""
    grace_s: float
    """For so long what was removed can be taken back."""


class Pruning:
    """Deletes what policies do not keep."""

    def __init__(
        self,
        store: Store,
        synchronizing: Synchronizing,
        metrics: Metrics,
        clock: Clock,
        on_pruned: Callable[[Sequence[Checkpoint]], None],
    ) -> None:
        """on_pruned: called with what a prune removed."""
        self._on_pruned = on_pruned
        self._store = store
        self._synchronizing = synchronizing
        self._metrics = metrics
        self._clock = clock

    def prune(self, wanted: Prune, dry_run: bool, by: str) -> Pruned:
        """Plan, and without dry_run hide; what was removed is gone from all listings on return.

        by: who wants it, for the audit log. Raises NoCheckpoint where the runs that are named have none, InvalidPolicy,
        TooMuchToDelete, or Unavailable: then part of the plan may be done.
        """
        planned = plan_prunes(self._store, wanted, self._clock)
        verdicts = tuple(verdict for plan in planned.plans for verdict in plan.verdicts)
        if dry_run:
            return Pruned(verdicts, tuple(planned.remove), (), planned.grace_s)
        spared = self.apply(planned, by, wanted.looked_at)
        removed = tuple(checkpoint for checkpoint in planned.remove if checkpoint not in spared)
        return Pruned(verdicts, removed, spared, planned.grace_s)

    def apply(self, planned: PrunePlans, by: str, looked_at: bool = False) -> tuple[Checkpoint, ...]:
        """Hide what is planned to go; returns what was spared. Raises as `prune` does."""
        if not planned.remove:
            return ()
        spared = apply_prunes(self._store, planned, self._clock, by, looked_at, after_run=self._synchronizing.sync_run)
        removed = [checkpoint for checkpoint in planned.remove if checkpoint not in spared]
        self._metrics.prune_deleted.inc(len(removed))
        self._metrics.prune_freed_bytes.inc(sum(checkpoint.stored_bytes for checkpoint in removed))
        self._on_pruned(removed)
        return tuple(spared)
