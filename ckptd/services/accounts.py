"""Accounts: what became of the time of runs (ckptctl goodput), from the index and the heartbeats in the store."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from ckptd.services.catalog import Catalog
from ckptstore.analysis.goodput import Account, EndOf, read_account
from ckptstore.clock import Clock
from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import CkptError
from ckptstore.run import Run
from ckptstore.stores import Store

_LOG = logging.getLogger(__name__)
_MOST_CHECKPOINTS = 5_000


@dataclass
class Accounts:
    """Computes accounts. Any thread may call `of_run` and `known`; `refresh` is for one background thread."""

    _store: Store
    _catalog: Catalog
    _clock: Clock
    _known: dict[str, Account] = field(default_factory=dict)

    def of_run(self, run: str) -> Account:
        """The account of a run, computed now. Raises InvalidName, NoCheckpoint or Unavailable.

        If the run has more than 5,000 checkpoints, the newest ones count.
        """
        found = self._catalog.newest(run, _MOST_CHECKPOINTS)
        account = self._known[run] = read_account(Run(self._store, run, self._clock), found)
        return account

    def known(self) -> dict[str, Account]:
        """The newest account of each run, at most as old as the last refresh; for metrics."""
        return dict(self._known)

    def refresh(self) -> None:
        """Compute the accounts of runs that go on, or that are not known. Raises IndexUnavailable."""
        summaries = {summary.run: summary for summary in self._catalog.runs()}
        for name in self.known().keys() - summaries.keys():
            self._known.pop(name, None)
        for name, summary in summaries.items():
            if self._ended(name, summary.latest):
                continue
            try:
                self.of_run(name)
            except CkptError as error:
                _LOG.warning("cannot account for the time of run %s: %s", name, error)

    def _ended(self, name: str, latest: Checkpoint | None) -> bool:
        """Whether the account of a run cannot have changed: it ended, and saved nothing since."""
        known = self._known.get(name)
        if known is None or known.attempts[-1].ended is EndOf.RUNNING:
            return False
        if known.local_only is not None and known.local_only.checkpoints:
            return False  # the saver outlives its trainer
        return latest is None or latest.created_at <= known.until
