"""Unfinished attempts: commits those that are complete, collects those that are abandoned. Only the leader does this.

The collector also finishes interrupted deletions, and deletes expired leases.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from ckptd.housekeeping.leadership import reported
from ckptd.index import Index
from ckptd.metrics import Metrics
from ckptd.services.store_sync import PollPlan
from ckptstore.clock import Clock
from ckptstore.commits.catalog import list_runs
from ckptstore.commits.commit import receipt_ranks
from ckptstore.errors import CkptError
from ckptstore.names import Attempt
from ckptstore.retention.deletion import Waste, advance, collect, measure_waste, undecided_attempts
from ckptstore.run import Run
from ckptstore.stores import Store
from ckptstore.stores.checks import check_store

_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class _Seen:
    num_receipts: int
    since: float
    tried: bool = False


@dataclass
class Recovery:
    """Finds attempts that have no outcome yet in all runs, and commits those that are complete. For one thread."""

    _store: Store
    _index: Index
    _metrics: Metrics
    _clock: Clock
    _grace_s: float
    """The committer counts as dead after this time without a new receipt."""
    _on_commit: Callable[[str, Attempt], object]
    _seen: dict[str, dict[Attempt, _Seen]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._poll_plan = PollPlan(self._clock)

    def run_once(self) -> None:
        """List each run once, and again only if an attempt is not in the index. Raises CkptError."""
        for run in self._poll_plan.due(self._index.versions()):
            with reported(self._count, run):
                self._recover(Run(self._store, run, self._clock))

    def _recover(self, run: Run) -> None:
        present = set(self._store.list_folders(run.keys.attempts))
        known = self._index.attempts(run.name)
        decided = {str(attempt) for attempt in (*known.checkpoints, *known.aborted)}
        if present <= decided:
            return
        for attempt in self.advance_run(run):
            _LOG.warning("committed %s: its own committer did not", run.id_of(attempt))
            self._metrics.rolled_forward.inc()
            self._on_commit(run.name, attempt)

    def advance_run(self, run: Run) -> list[Attempt]:
        """Commit finished attempts that were unchanged for the grace period; returns those that are committed now."""
        before, found = self._seen.get(run.name, {}), dict[Attempt, _Seen]()
        for attempt in undecided_attempts(run):
            known, count = before.get(attempt), len(receipt_ranks(run, attempt))
            found[attempt] = known if known and known.num_receipts == count else _Seen(count, self._clock())
        self._seen[run.name] = found
        return [attempt for attempt, seen in found.items() if self._advance(run, attempt, seen)]

    def _advance(self, run: Run, attempt: Attempt, seen: _Seen) -> bool:
        if seen.tried or not seen.num_receipts or self._clock() - seen.since < self._grace_s:
            return False
        committed = advance(run, attempt)
        # Not committed: receipts are missing or damaged. Try again when there are more.
        seen.tried = True
        return committed

    def _count(self, run: str, error: CkptError) -> None:
        _LOG.warning("cannot check for unfinished attempts of run %s: %s", run, error)
        self._metrics.count_store_error("recover", error)


@dataclass
class OrphanCollector:
    """Runs the collector over all runs. For one background thread."""

    _store: Store
    _metrics: Metrics
    _clock: Clock
    _grace_s: float
    _waste: dict[str, Waste] = field(default_factory=dict)
    _measured: bool = False

    def waste(self) -> Waste | None:
        """Bytes left in all runs by the last round; None before its end. Any thread may call."""
        if not self._measured:
            return None
        found = list(self._waste.values())
        return Waste(sum(waste.orphans for waste in found), sum(waste.tombstoned for waste in found))

    def run_once(self) -> None:
        """Collect in every run; a run that fails is tried again in the next round. Raises LeadershipLost."""
        with reported(self._count, "all runs"):
            check_store(self._store, self._clock)
            runs = list_runs(self._store)
            self._waste = {run: waste for run, waste in self._waste.items() if run in runs}
            for run in runs:
                with reported(self._count, run):
                    self._collect(run)
            self._measured = True

    def _collect(self, name: str) -> None:
        run = Run(self._store, name, self._clock)
        collected = collect(run, self._grace_s)
        self._waste = {**self._waste, name: measure_waste(run)}
        self._metrics.rolled_forward.inc(len(collected.rolled_forward))
        self._metrics.orphans_aborted.inc(len(collected.aborted))
        self._metrics.orphan_freed_bytes.inc(collected.freed_bytes)
        if collected.aborted:
            _LOG.info(
                "aborted %d orphaned attempts of run %s and freed %d bytes",
                len(collected.aborted),
                name,
                collected.freed_bytes,
            )

    def _count(self, name: str, error: CkptError) -> None:
        _LOG.warning("cannot collect orphans of %s: %s", name, error)
        self._metrics.store_errors.labels("collect", error.code).inc()
