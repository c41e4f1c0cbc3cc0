"""One face for pruning a store and pruning through a daemon: plan, then apply what was planned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ckptctl.session import Session, no_checkpoints
from ckptstore.clock import Clock
from ckptstore.deletion import PrunePlan, apply_prune, plan_prune
from ckptstore.names import check_run
from ckptstore.reading import Progress
from ckptstore.retention import Policy
from ckptstore.stores import Store
from ckptstore.wire import CheckpointBody, PruneBody, PruneItem

if TYPE_CHECKING:
    from ckptstore.daemon import DaemonClient


class Pruning(Protocol):
    """One prune, of one run or of each run by itself."""

    def plan(self) -> PruneBody:
        """What would go and what would stay. Deletes nothing."""

    def apply(self, progress: Progress) -> PruneBody:
        """Delete; what is reported removed is gone for good on return. progress: stored bytes."""


def open_pruning(session: Session, policy: Policy, run: str | None) -> Pruning:
    """The pruning of the session's target."""
    if session.target.is_daemon:
        return _DaemonPruning(session.daemon("prune"), policy, run)
    store = session.store("prune")
    runs = session.source.runs() if run is None else [check_run(run)]
    plans = [plan_prune(store, name, policy, session.clock) for name in runs]
    if run is not None and not plans[0].verdicts:
        raise no_checkpoints(run, store.url)
    return _StorePruning(store, plans, session.clock)


class _StorePruning:
    def __init__(self, store: Store, plans: list[PrunePlan], clock: Clock) -> None:
        self._store = store
        self._plans = plans
        self._clock = clock

    def plan(self) -> PruneBody:
        return self._body(dry_run=True, spared=[])

    def apply(self, progress: Progress) -> PruneBody:
        spared: list[str] = []
        for plan in self._plans:
            held = apply_prune(self._store, plan, self._clock, lambda c: progress(c.stored_bytes))
            spared += [checkpoint.id for checkpoint in held]
        return self._body(dry_run=False, spared=spared)

    def _body(self, dry_run: bool, spared: list[str]) -> PruneBody:
        verdicts = [verdict for plan in self._plans for verdict in plan.verdicts]
        gone = [v.checkpoint for v in verdicts if not v.reasons and v.checkpoint.id not in spared]
        return PruneBody(
            dry_run=dry_run,
            items=[PruneItem(checkpoint=CheckpointBody.of(v.checkpoint), reasons=list(v.reasons)) for v in verdicts],
            freed_bytes=sum(c.stored_bytes for c in gone),
            held=spared,
        )


class _DaemonPruning:
    def __init__(self, daemon: DaemonClient, policy: Policy, run: str | None) -> None:
        self._daemon = daemon
        self._policy = policy
        self._run = run

    def plan(self) -> PruneBody:
        return self._daemon.prune(self._policy.keep_last, self._run, dry_run=True)

    def apply(self, progress: Progress) -> PruneBody:
        return self._daemon.prune(self._policy.keep_last, self._run, dry_run=False)
