"""Operations on the checkpoints of a store (ckptapi.client: through a daemon)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

from ckptstore.clock import Clock, system_clock
from ckptstore.commits import audit, catalog, labels
from ckptstore.commits.audit import AuditEntry
from ckptstore.commits.catalog import Checkpoint
from ckptstore.commits.labels import LabelChange
from ckptstore.errors import NoCheckpoint
from ckptstore.format.records import PolicySet
from ckptstore.names import Reference
from ckptstore.reading.fetch import Progress
from ckptstore.reading.source import StoreSource
from ckptstore.retention import deletion, pins, policy
from ckptstore.retention.deletion import CollectReport, Deleted
from ckptstore.retention.pins import NamedPin
from ckptstore.retention.policy import PoliciesInForce
from ckptstore.retention.pruning import Prune, PrunePlan, apply_prunes, plan_prunes
from ckptstore.run import Run, identity
from ckptstore.stores import Store
from ckptstore.stores.checks import StoreReport, check_store, run_store_checks


@dataclass
class StoreOperator:
    """The operations of an operator, on a store. Any thread may call any method. Every method may raise Unavailable.

    ckptapi.client.DaemonClient has the same methods, for a daemon.
    """

    store: Store
    _clock: Clock = system_clock
    _by: str = ""
    """The caller, for the audit log; empty: this process."""
    _on_change: Callable[[str], object] = lambda _: None
    """Called with each run that was changed."""
    check_deletes: bool = True
    """Probe the store before a single deletion; False for a caller that probes it regularly."""

    def __post_init__(self) -> None:
        self._by = self._by or identity()

    def run(self, name: str) -> Run:
        """One run, with this operator's clock and name. Raises InvalidName."""
        return Run(self.store, name, self._clock, self._by)

    def read_past_caches(self) -> None:
        """Bypass all caches from now on: there are none."""

    def checkpoints(self, run: str) -> list[Checkpoint]:
        """All checkpoints of a run, newest step first."""
        return StoreSource(self.store, self._clock).checkpoints(run)

    def delete(self, checkpoint: Checkpoint, grace_s: float, reason: str = "", force: bool = False) -> None:
        """Hide a checkpoint and delete it after the grace; hidden durably on return.

        force: even if it is the newest one of its run. Raises NoCheckpoint or CheckpointHeld.
        """
        if self.check_deletes:
            self.check()
        with self._changing(checkpoint.run) as run:
            deletion.delete_checkpoint(run, checkpoint.attempt, reason, grace_s, force)

    def undelete(self, reference: Reference, reason: str = "") -> Checkpoint:
        """Undo a deletion; listed, and pinned as `undeleted`, on return. Raises NoCheckpoint or SweepBegun."""
        with self._changing(reference.run) as run:
            found = deletion.undelete_checkpoint(run, reference, reason)
        return labels.find(run, found)

    def deleted(self, run: str) -> list[Deleted]:
        """Checkpoints of a run that are hidden and can be undeleted, newest step first. Raises InvalidName."""
        return deletion.list_deleted(self.run(run))

    def pin(self, checkpoint: Checkpoint, name: str, reason: str = "") -> None:
        """Keep a checkpoint until the pin is removed; durable on return. Raises InvalidName or NoCheckpoint."""
        pins.pin(self.run(checkpoint.run), checkpoint.attempt, name, reason, checkpoint.thinned)

    def unpin(self, checkpoint: Checkpoint, name: str) -> None:
        """Remove a pin. Idempotent. Raises InvalidName or NoCheckpoint."""
        pins.unpin(self.run(checkpoint.run), checkpoint.attempt, name)

    def pins(self, run: str) -> list[NamedPin]:
        """All pins of a run, newest step first. Raises InvalidName."""
        return pins.list_pins(self.run(run))

    def label(self, checkpoint: Checkpoint, change: LabelChange, reason: str = "") -> Checkpoint:
        """Change tags and metrics; durable on return. Raises InvalidRequest or NoCheckpoint."""
        run, attempt = self.run(checkpoint.run), checkpoint.attempt
        labels.change_labels(run, attempt, change, reason)
        self._on_change(run.name)
        return labels.find(run, Reference(run.name, attempt.step, attempt.ulid))

    def audit(self, run: str, limit: int = 100) -> list[AuditEntry]:
        """The audit log of a run, newest entry first. Raises InvalidName."""
        records = islice(audit.read_log(self.run(run)), limit)
        return [AuditEntry.of(run, record) for record in records]

    def policies(self) -> PoliciesInForce:
        """The policies in force; version 0: policies were never set."""
        return policy.read_policies(self.store)

    def policies_history(self, limit: int = 100) -> list[PoliciesInForce]:
        """The newest versions of the policies, newest first."""
        return policy.policies_history(self.store, limit)

    def change_policies(self, policies: PolicySet, expected: int, reason: str = "") -> PoliciesInForce:
        """Replace version `expected` of the policies (0 for none); durable on return.

        Raises InvalidRequest, or Conflict if that is not the newest version.
        """
        return policy.change_policies(self.store, policies, expected, self._by, self._clock, reason)

    def plan_prune(self, prune: Prune) -> PrunePlan:
        """Which checkpoints a prune would delete and keep, and why. Deletes nothing.

        Raises NoCheckpoint if runs are given and no matching run has a checkpoint, or InvalidRequest if neither the
        prune nor the store has a policy.
        """
        return plan_prunes(self.store, prune, self._clock)

    def prune(self, prune: Prune, plan: PrunePlan | None = None, progress: Progress = lambda _: None) -> PrunePlan:
        """Delete what the policy does not keep. Checkpoints that the returned plan removes are no longer listed.

        plan: the plan that the caller has seen; a store follows it, a daemon plans again. progress is called with the
        number of stored bytes. Raises what `plan_prune` raises, TooMuchToDelete unless the prune is forced,
        StoreUnsafe.
        """
        plan = plan or self.plan_prune(prune)
        if not plan.affected:
            return plan
        return apply_prunes(self.store, plan, self._clock, self._by, prune.force, progress, self._on_change)

    def collect(self, run: str | None = None, grace_s: float | None = None) -> list[CollectReport]:
        """Delete data that is due and clean up after crashes, in one run or in all; durable on return.

        grace_s: an orphan is deleted if nothing was written to it for this time; None: the default. A daemon has a
        setting instead and raises InvalidRequest. Raises NoCheckpoint for an unknown run, or StoreUnsafe.
        """
        return list(self.collect_each(self.collectable(run), grace_s))

    def collectable(self, run: str | None) -> list[str]:
        """The named run, or all runs with something in the store. Raises InvalidName or NoCheckpoint."""
        runs = catalog.list_runs(self.store)
        if run is None:
            return runs
        if self.run(run).name not in runs:
            raise NoCheckpoint(f"run {run!r} has nothing in {self.store.url}", "ckptctl runs lists the runs")
        return [run]

    def collect_each(self, runs: Iterable[str], grace_s: float | None) -> Iterator[CollectReport]:
        """Collect in each run; yields the report of a run when it is done. Needs synchronized clocks: see `check`."""
        self.check()
        for name in runs:
            yield deletion.collect(self.run(name), deletion.ORPHAN_GRACE_S if grace_s is None else grace_s)

    def check(self) -> None:
        """Return if it is safe to delete on this store now. Raises StoreUnsafe or Unavailable."""
        check_store(self.store, self._clock)

    def probe(self) -> StoreReport:
        """Run the checks of the store, with a few small objects."""
        return run_store_checks(self.store, self._clock)

    @contextmanager
    def _changing(self, run: str) -> Iterator[Run]:
        # A failed change may have been applied in part.
        try:
            yield self.run(run)
        finally:
            self._on_change(run)
