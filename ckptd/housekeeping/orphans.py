"""Collects orphans: abandoned attempts, interrupted deletions, expired leases. Only the leader does this."""

from __future__ import annotations

import logging

from ckptd.metrics import Metrics
from ckptstore.clock import Clock
from ckptstore.commits.catalog import list_runs
from ckptstore.errors import CkptError, LeadershipLost
from ckptstore.retention.deletion import Waste, collect, measure_waste
from ckptstore.run import Run
from ckptstore.stores import Store
from ckptstore.stores.checks import check_store

_LOG = logging.getLogger(__name__)


class OrphanCollector:
    """Runs the collector over all runs. For one background thread."""

    def __init__(self, store: Store, metrics: Metrics, clock: Clock, grace_s: float) -> None:
        self._store = store
        self._metrics = metrics
        self._clock = clock
        self._grace_s = grace_s
        self._waste: dict[str, Waste] = {}

    def waste(self) -> Waste:
        """Bytes left in all runs by the last round. Any thread may call."""
        found = list(self._waste.values())
        return Waste(sum(waste.orphans for waste in found), sum(waste.tombstoned for waste in found))

    def run_once(self) -> None:
        """Collect in every run; a run that fails is tried again in the next round. Never raises CkptError."""
        try:
            check_store(self._store, self._clock)
            runs = list_runs(self._store)
            self._waste = {run: waste for run, waste in self._waste.items() if run in runs}
            for run in runs:
                self._collect(run)
        except LeadershipLost as error:
            _LOG.warning("leaving orphan collection to another daemon: %s", error)
        except CkptError as error:
            self._count(error)

    def _collect(self, name: str) -> None:
        try:
            run = Run(self._store, name, self._clock)
            collected = collect(run, self._grace_s)
            self._waste = {**self._waste, name: measure_waste(run)}
        except LeadershipLost:
            raise
        except CkptError as error:
            self._count(error)
            return
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

    def _count(self, error: CkptError) -> None:
        _LOG.warning("cannot collect orphans: %s", error)
        self._metrics.store_errors.labels("collect", error.code).inc()
