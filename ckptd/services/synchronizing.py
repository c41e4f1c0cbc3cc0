"""Makes the index equal to the store: by rounds of listings, by notification, or by reading everything again.

What is removed from the index was missing from a listing that succeeded, while its run was there.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor

from ckptd.index import Index
from ckptd.metrics import Metrics
from ckptd.services.freshness import Freshness
from ckptd.services.recovery import Recovery
from ckptstore.catalog import Checkpoint, State, from_outcome, hidden_attempts, list_runs, visible_attempts
from ckptstore.clock import Clock
from ckptstore.commit import read_outcome
from ckptstore.errors import AttemptAborted, CkptError, CorruptObject, NoCheckpoint, StoreUnavailable, Unavailable
from ckptstore.names import Attempt, check_run, checkpoint_id
from ckptstore.stores import Store

_LOG = logging.getLogger(__name__)
_READERS = 16


class Synchronizing:
    """Reads the store, writes the index. `round` is for one background thread, the rest for any."""

    def __init__(
        self, store: Store, index: Index, recovery: Recovery, freshness: Freshness, metrics: Metrics, clock: Clock
    ) -> None:
        self._store = store
        self._index = index
        self._recovery = recovery
        self._freshness = freshness
        self._metrics = metrics
        self._clock = clock
        self._one_at_a_time = threading.Lock()

    def round(self) -> None:
        """List the store once, commit what a dead committer left, and update the index. Never raises CkptError."""
        began_at = self._clock()
        try:
            runs = self._list_runs()
        except CkptError as error:
            self._count(error)
            self._freshness.report_failure(error)
            return
        failures = {}
        for run in runs:
            try:
                self._recover(run)
                self.sync_run(run)
            except CkptError as error:
                self._count(error)
                failures[run] = error
        self._freshness.report(began_at, runs, failures)

    def sync_run(self, run: str, reread: bool = False) -> None:
        """Make the index of one run equal to the store. reread: also outcomes that were read before."""
        with self._one_at_a_time:
            # First the index, then the store: a commit that is notified in between is not taken for a deletion.
            known = self._index.attempts(run)
            visible = visible_attempts(self._store, run)
            gone = (known.checkpoints | known.aborted) - set(visible)
            if gone:
                self._still_there(run)
            read_before = frozenset() if reread else (known.checkpoints - known.corrupt) | known.aborted
            unread = [attempt for attempt in visible if attempt not in read_before]
            found, given_up, vanished = self._read_all(run, unread)
            # A corrupt outcome is read every time, but only news is written.
            if not reread:
                found = [c for c in found if not (c.state is State.CORRUPT and c.attempt in known.corrupt)]
            self._index.apply(run, found, given_up, [*gone, *vanished])

    def notify(self, run: str, attempt: Attempt) -> Checkpoint:
        """Index an attempt if the store says that it is committed; the word of the notifier counts for nothing.

        Raises NoCheckpoint if it is not committed or is being deleted, AttemptAborted, or Unavailable.
        """
        check_run(run)
        found = self._read(run, attempt)
        if isinstance(found, Attempt):
            raise AttemptAborted(f"attempt {attempt} of run {run!r} was aborted", "Save again")
        if found is None or attempt in hidden_attempts(self._store, run):
            raise NoCheckpoint(
                f"{checkpoint_id(run, attempt)} is not committed in {self._store.url}",
                "Notify after the commit; does the daemon serve the store that the trainer writes to?",
            )
        self._index.apply(run, [found])
        return found

    def reindex(self) -> tuple[int, int]:
        """Read every outcome again. Returns the numbers of runs and checkpoints.

        A store that lists nothing is believed here, and here only. Raises Unavailable: what was read before is kept.
        """
        began_at = self._clock()
        runs = list_runs(self._store)
        self._index.drop_runs(set(self._index.runs()) - set(runs))
        for run in runs:
            self.sync_run(run, reread=True)
        self._freshness.report(began_at, runs, {})
        summaries = self._index.summaries()
        return len(summaries), sum(summary.num_checkpoints for summary in summaries)

    def _list_runs(self) -> list[str]:
        """The runs of the store; those that the index has and the store has no more are dropped."""
        runs = list_runs(self._store)
        known = self._index.runs()
        if known and not runs:
            raise StoreUnavailable(
                f"{self._store.url} lists no run, but held {len(known)} before: is the volume mounted?",
                "If it was emptied on purpose, POST /v1/reindex",
            )
        vanished = set(known) - set(runs)
        if vanished:
            self._index.drop_runs(vanished)
        return runs

    def _still_there(self, run: str) -> None:
        # A volume that is unmounted between two listings looks like a run without outcomes.
        if run not in list_runs(self._store):
            raise StoreUnavailable(f"{self._store.url} lost run {run!r} while it was listed", "Is the volume mounted?")

    def _recover(self, run: str) -> None:
        for attempt in self._recovery.advance_run(run):
            _LOG.warning("committed %s: its own committer did not", checkpoint_id(run, attempt))
            self._metrics.rolled_forward.inc()

    def _read_all(
        self, run: str, attempts: Collection[Attempt]
    ) -> tuple[list[Checkpoint], list[Attempt], list[Attempt]]:
        """Checkpoints, aborted attempts, and attempts whose outcome went while we read."""
        with ThreadPoolExecutor(_READERS) as pool:
            results: Iterable[Checkpoint | Attempt | None] = pool.map(lambda a: self._read(run, a), attempts)
            pairs = list(zip(attempts, results, strict=True))
        return (
            [result for _, result in pairs if isinstance(result, Checkpoint)],
            [result for _, result in pairs if isinstance(result, Attempt)],
            [attempt for attempt, result in pairs if result is None],
        )

    def _read(self, run: str, attempt: Attempt) -> Checkpoint | Attempt | None:
        """A checkpoint; the attempt itself if it was aborted; None if it has no outcome."""
        try:
            outcome = read_outcome(self._store, run, attempt)
        except CorruptObject as error:
            return Checkpoint(run, attempt, State.CORRUPT, problem=str(error))
        if outcome is None:
            return None
        return from_outcome(outcome) or attempt

    def _count(self, error: CkptError) -> None:
        _LOG.warning("cannot follow the store: %s", error)
        if isinstance(error, Unavailable):
            self._metrics.store_errors.labels("sync", error.code).inc()
