"""Backlogs: what is in near stores only, as their carriers have reported it to the store (ckptstore.commits.backlogs).

While the store is away neither a carrier can report nor the daemon read: the last reports stay, and get older. Runs
whose trainers have ended count like all others.
"""

from __future__ import annotations

import logging

from ckptd.index import Index
from ckptd.services.store_sync import PollPlan
from ckptstore.clock import Clock
from ckptstore.commits.backlogs import RunBacklog, read_backlog
from ckptstore.commits.catalog import list_runs
from ckptstore.errors import CkptError, Unavailable
from ckptstore.names import check_run
from ckptstore.run import Run
from ckptstore.stores import Store

_LOG = logging.getLogger(__name__)


class Backlogs:
    """Reads backlogs. `refresh` is for one background thread, the rest for any."""

    def __init__(self, store: Store, index: Index, clock: Clock) -> None:
        self._store = store
        self._index = index
        self._clock = clock
        self._plan = PollPlan(clock)
        self._known: dict[str, RunBacklog] = {}

    def of_run(self, run: str) -> RunBacklog | None:
        """The backlog of a run, read now; None if it has no near store. Raises InvalidName or Unavailable."""
        found = read_backlog(Run(self._store, check_run(run), self._clock))
        if found is not None:
            self._known[run] = found
        else:
            self._known.pop(run, None)
        return found

    def last_of_run(self, run: str) -> RunBacklog | None:
        """As `of_run`; the last known one if the store is away. Raises InvalidName."""
        try:
            return self.of_run(run)
        except Unavailable:
            return self._known.get(run)

    def known(self) -> dict[str, RunBacklog]:
        """The last known backlog of each run that has a near store, as of the last refresh."""
        return dict(self._known)

    def refresh(self) -> None:
        """Read the backlogs of runs that change or had one; those of other runs in every sixth round.

        Raises Unavailable.
        """
        versions, runs = self._index.versions(), list_runs(self._store)
        for name in self.known().keys() - set(runs):
            self._known.pop(name, None)
        behind = {name for name, found in self.known().items() if found.checkpoints}
        for name in sorted(behind.union(self._plan.due({name: versions.get(name, 0) for name in runs}))):
            try:
                self.of_run(name)
            except CkptError as error:
                _LOG.warning("cannot read the backlog of run %s: %s", name, error)
