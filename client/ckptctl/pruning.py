"""One face for pruning a store and pruning through a daemon: plan, then apply."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ckptapi.bodies import CheckpointBody, PruneBody, PruneItem
from ckptctl.session import Session
from ckptstore.clock import Clock
from ckptstore.commits.audit import operator
from ckptstore.commits.catalog import Checkpoint
from ckptstore.reading.fetch import Progress
from ckptstore.retention.policy import rules_of
from ckptstore.retention.pruning import Prune, PrunePlans, apply_prunes, plan_prunes
from ckptstore.stores import Store

if TYPE_CHECKING:
    from ckptapi.client import DaemonClient


class Pruning(Protocol):
    """One prune, of the runs that are wanted, each by itself."""

    def plan(self) -> PruneBody:
        """What would go and what would stay. Deletes nothing."""

    def apply(self, progress: Progress, looked_at: bool) -> PruneBody:
        """Hide; what is reported removed is listed no more on return. progress: stored bytes."""


def open_pruning(session: Session, wanted: Prune) -> Pruning:
    """The pruning of the session's target."""
    if session.target.is_daemon:
        return _DaemonPruning(session.daemon("prune"), wanted)
    store = session.store("prune")
    return _StorePruning(store, plan_prunes(store, wanted, session.clock), session.clock)


class _StorePruning:
    def __init__(self, store: Store, planned: PrunePlans, clock: Clock) -> None:
        self._store = store
        self._planned = planned
        self._clock = clock

    def plan(self) -> PruneBody:
        return self._body(dry_run=True, spared=[])

    def apply(self, progress: Progress, looked_at: bool) -> PruneBody:
        def done(checkpoint: Checkpoint) -> None:
            progress(checkpoint.stored_bytes)

        spared = apply_prunes(self._store, self._planned, self._clock, operator(), looked_at, done)
        return self._body(dry_run=False, spared=[checkpoint.id for checkpoint in spared])

    def _body(self, dry_run: bool, spared: list[str]) -> PruneBody:
        verdicts = [verdict for plan in self._planned.plans for verdict in plan.verdicts]
        return PruneBody(
            dry_run=dry_run,
            items=[PruneItem(checkpoint=CheckpointBody.of(v.checkpoint), reasons=list(v.reasons)) for v in verdicts],
            freed_bytes=sum(c.stored_bytes for c in self._planned.remove if c.id not in spared),
            held=spared,
            grace_s=self._planned.grace_s,
        )


class _DaemonPruning:
    def __init__(self, daemon: DaemonClient, wanted: Prune) -> None:
        self._daemon = daemon
        self._wanted = wanted

    def plan(self) -> PruneBody:
        return self._ask(dry_run=True, force=False)

    def apply(self, progress: Progress, looked_at: bool) -> PruneBody:
        return self._ask(dry_run=False, force=looked_at)

    def _ask(self, dry_run: bool, force: bool) -> PruneBody:
        policy = self._wanted.policy
        rules = rules_of(policy) if policy is not None else None
        return self._daemon.prune(
            run=self._wanted.runs, dry_run=dry_run, rules=rules, grace_s=self._wanted.grace_s, force=force
        )
