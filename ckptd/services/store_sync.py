"""Makes the index equal to the store: by rounds of listings, by notification, or by reading everything again.

What is removed from the index was missing from a listing that succeeded, while its run was there. What was read is
written only if nobody has changed the run meanwhile, in this daemon or in another one that shares the index: else it
may be old news, and the run is looked at again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from zlib import crc32

from ckptd.index import Index, IndexedAttempts, Reading, RunChanged, Stamp
from ckptd.metrics import Metrics
from ckptd.services.freshness import Freshness
from ckptstore import names
from ckptstore.clock import Clock
from ckptstore.commits.catalog import (
    Checkpoint,
    State,
    from_outcome,
    hidden_attempts,
    list_runs,
    quarantined,
    quarantined_attempts,
)
from ckptstore.commits.commit import read_outcome
from ckptstore.commits.labels import label_versions, labelled, newest_labels, with_labels
from ckptstore.errors import (
    AttemptAborted,
    CkptError,
    CorruptObject,
    IndexUnavailable,
    InvalidName,
    NoCheckpoint,
    StoreUnavailable,
    Unavailable,
)
from ckptstore.names import Attempt, check_run, checkpoint_id
from ckptstore.run import Run
from ckptstore.stores import Store

_LOG = logging.getLogger(__name__)
_READERS = 16
_LISTERS = 4
_BATCH = 1000
"""Outcomes that are read before they are written, so that a first reading that is interrupted goes on."""
_TRIES = 10
IDLE_AFTER_S = 600.0
IDLE_ROUNDS = 6


@dataclass(frozen=True, slots=True)
class _Listing:
    """What the store says of a run."""

    outcomes: Mapping[Attempt, Stamp]
    """Those that are not hidden, by falling step."""
    damaged: frozenset[Attempt]
    labels: Mapping[Attempt, int]
    """The newest version of the labels of those that have some."""
    fingerprint: int


class PollPlan:
    """Which runs a round looks at: those that changed within ten minutes, and each sixth time the others.

    For one thread. A listing costs time and money: thousands of runs that ended must not slow down those that go on.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rounds = count()
        self._changed: dict[str, tuple[int, float]] = {}

    def due(self, versions: Mapping[str, int]) -> list[str]:
        """Of all runs, given with their versions, those of this round. A run seen for the first time is due."""
        now = self._clock()
        number = next(self._rounds)
        self._changed = {
            run: before if (before := self._changed.get(run)) and before[0] == version else (version, now)
            for run, version in versions.items()
        }
        return [
            run
            for run, (_, changed_at) in self._changed.items()
            if now - changed_at < IDLE_AFTER_S or (number + crc32(run.encode())) % IDLE_ROUNDS == 0
        ]


class StoreSync:
    """Reads the store, writes the index. `round` is for one background thread, the rest for any."""

    def __init__(self, store: Store, index: Index, freshness: Freshness, metrics: Metrics, clock: Clock) -> None:
        self._store = store
        self._index = index
        self._freshness = freshness
        self._metrics = metrics
        self._clock = clock
        self._poll_plan = PollPlan(clock)
        self._failed: set[str] = set()
        self._equal: dict[str, tuple[int, int]] = {}
        """Fingerprint and version of runs whose index was found equal to the store."""
        self._lock = threading.Lock()

    def run_once(self) -> None:
        """List the runs in which something may have happened, and update the index. Never raises CkptError."""
        began_at = self._clock()
        try:
            versions = self._list_runs()
        except CkptError as error:
            self._count(error)
            self._freshness.report_failure(error)
            return
        due = sorted({*self._poll_plan.due(versions), *(self._failed & versions.keys())})
        with ThreadPoolExecutor(_LISTERS) as pool:
            results = pool.map(lambda run: self._try(run, versions[run]), due)
            failures = {run: error for run, error in zip(due, results, strict=True) if error is not None}
        self._failed = set(failures)
        self._freshness.report(began_at, versions, failures)

    def sync_run(self, run: str, reread: bool = False) -> None:
        """Make the index of one run equal to the store. reread: also outcomes that were read before."""
        done: set[Attempt] = set()
        stalled = 0
        while stalled < _TRIES:
            before = len(done)
            try:
                # First the index, then the store: a commit that is notified in between is not taken for a deletion.
                known = self._index.attempts(run)
                self._update(run, known, self._list(run), reread, done)
                return
            except RunChanged:
                stalled = 0 if len(done) > before else stalled + 1
        raise IndexUnavailable(f"run {run!r} changes faster than it can be read", "Try again")

    def notify(self, run: str, attempt: Attempt) -> Checkpoint:
        """Index an attempt if the store says that it is committed; the word of the notifier counts for nothing.

        Raises NoCheckpoint if it is not committed or is being deleted, AttemptAborted, or Unavailable.
        """
        check_run(run)
        for _ in range(_TRIES):
            version = self._index.version(run)
            found = self._read(run, attempt, quarantined_attempts(self._run(run)))
            if isinstance(found, Attempt):
                raise AttemptAborted(f"attempt {attempt} of run {run!r} was aborted", "Save again")
            if found is None or attempt in hidden_attempts(self._run(run)):
                raise NoCheckpoint(
                    f"{checkpoint_id(run, attempt)} is not committed in {self._store.url}",
                    "Notify after the commit; does the daemon serve the store that the trainer writes to?",
                )
            [found] = with_labels(self._run(run), [found])
            try:
                self._index.apply(run, Reading([found]), version)
            except RunChanged:
                continue
            return found
        raise IndexUnavailable(f"run {run!r} changes faster than it can be read", "Try again")

    def reindex(self) -> tuple[int, int]:
        """Read every outcome again. Returns the numbers of runs and checkpoints.

        A store that lists nothing is believed here, and here only. Raises Unavailable: what was read before is kept.
        """
        began_at = self._clock()
        known = self._index.versions()
        runs = list_runs(self._store)
        self._forget(known, runs)
        for run in runs:
            self.sync_run(run, reread=True)
        self._freshness.report(began_at, runs, {})
        summaries = self._index.summaries()
        return len(summaries), sum(summary.num_checkpoints for summary in summaries)

    def _list_runs(self) -> dict[str, int]:
        """The runs of the store with their versions in the index, 0 for new ones; those that are gone are dropped."""
        known = self._index.versions()
        runs = list_runs(self._store)
        if known and not runs:
            raise StoreUnavailable(
                f"{self._store.url} lists no run, but held {len(known)} before: is the volume mounted?",
                "If it was emptied on purpose, POST /v1/reindex",
            )
        self._forget(known, runs)
        return {run: known.get(run, 0) for run in runs}

    def _forget(self, known: Mapping[str, int], listed: Collection[str]) -> None:
        # First the index, then the store, here too: a run that was notified in between has another version.
        present = set(listed)
        vanished = {run: version for run, version in known.items() if run not in present}
        if vanished:
            self._index.drop_runs(vanished)
        with self._lock:
            self._equal = {run: equal for run, equal in self._equal.items() if run in present}

    def _try(self, run: str, version: int) -> CkptError | None:
        try:
            listing = self._list(run)
            if self._equal.get(run) != (listing.fingerprint, version):
                self.sync_run(run)
        except CkptError as error:
            self._count(error)
            return error
        return None

    def _list(self, run: str) -> _Listing:
        # Outcomes first: a checkpoint hidden in between has its tombstone already.
        outcomes = list(self._store.list(self._run(run).keys.commits))
        hidden = hidden_attempts(self._run(run))
        damaged = quarantined_attempts(self._run(run))
        labels = {attempt: versions[-1] for attempt, versions in label_versions(self._run(run)).items()}
        stamps: dict[Attempt, Stamp] = {}
        for info in reversed(outcomes):
            try:
                attempt = names.attempt_and_name(info.key)[0]
            except InvalidName:
                continue  # not ours
            stamps[attempt] = Stamp(info.bytes, info.modified_at, labels.get(attempt, 0))
        for attempt in hidden:
            stamps.pop(attempt, None)
        fingerprint = hash((*outcomes, *hidden, None, *damaged, None, *labels.items()))
        return _Listing(stamps, frozenset(damaged), labels, fingerprint)

    def _update(self, run: str, known: IndexedAttempts, listing: _Listing, reread: bool, done: set[Attempt]) -> None:
        """Read what is new and write it, batch by batch. done: those that were written, in earlier tries as well."""
        indexed = {**known.checkpoints, **known.aborted}
        gone = [attempt for attempt in indexed if attempt not in listing.outcomes]
        if gone:
            self._still_there(run)
        # What looks broken is read every time, but only news is written.
        suspect = known.corrupt ^ (listing.damaged & known.checkpoints.keys())
        unread = [
            attempt
            for attempt, stamp in listing.outcomes.items()
            if attempt not in done and (reread or attempt in suspect or indexed.get(attempt) != stamp)
        ]
        version = known.version
        for first in range(0, len(unread), _BATCH):
            reading = self._read_all(run, unread[first : first + _BATCH], gone, listing)
            changed = reading if reread else _without(reading, known)
            if changed.found or changed.aborted or changed.gone:
                version = self._index.apply(run, changed, version)
            done.update(unread[first : first + _BATCH])
            gone = []
        if gone or not version:
            self._index.apply(run, Reading(gone=gone), version)
        elif not unread:
            with self._lock:
                self._equal[run] = (listing.fingerprint, version)

    def _still_there(self, run: str) -> None:
        # A volume that is unmounted between two listings looks like a run without outcomes.
        if run not in list_runs(self._store):
            raise StoreUnavailable(f"{self._store.url} lost run {run!r} while it was listed", "Is the volume mounted?")

    def _read_all(self, run: str, attempts: Collection[Attempt], gone: list[Attempt], listing: _Listing) -> Reading:
        with ThreadPoolExecutor(_READERS) as pool:
            results = list(pool.map(lambda attempt: self._read_labelled(run, attempt, listing), attempts))
        vanished = [attempt for attempt, result in zip(attempts, results, strict=True) if result is None]
        return Reading(
            found=[result for result in results if isinstance(result, Checkpoint)],
            aborted=[result for result in results if isinstance(result, Attempt)],
            gone=[*gone, *vanished],
            stamps=listing.outcomes,
        )

    def _read_labelled(self, run: str, attempt: Attempt, listing: _Listing) -> Checkpoint | Attempt | None:
        found = self._read(run, attempt, listing.damaged)
        if not isinstance(found, Checkpoint) or attempt not in listing.labels:
            return found
        return labelled(found, newest_labels(self._run(run), attempt, listing.labels[attempt]))

    def _read(self, run: str, attempt: Attempt, damaged: Collection[Attempt]) -> Checkpoint | Attempt | None:
        """A checkpoint; the attempt itself if it was aborted; None if it has no outcome."""
        try:
            outcome = read_outcome(self._run(run), attempt)
        except CorruptObject as error:
            return Checkpoint(run, attempt, State.CORRUPT, problem=str(error))
        if outcome is None:
            return None
        found = from_outcome(outcome)
        if found is None:
            return attempt
        return quarantined(found) if attempt in damaged else found

    def _run(self, name: str) -> Run:
        return Run(self._store, name, self._clock)

    def _count(self, error: CkptError) -> None:
        _LOG.warning("cannot follow the store: %s", error)
        if isinstance(error, Unavailable):
            self._metrics.store_errors.labels("sync", error.code).inc()


def _without(reading: Reading, known: IndexedAttempts) -> Reading:
    """Without what was known to be corrupt, and looks as it did."""

    def is_changed(checkpoint: Checkpoint) -> bool:
        attempt = checkpoint.attempt
        seen = attempt in known.corrupt and known.checkpoints[attempt] == reading.stamps.get(attempt)
        return checkpoint.state is not State.CORRUPT or not seen

    found = [checkpoint for checkpoint in reading.found if is_changed(checkpoint)]
    return Reading(found, reading.aborted, reading.gone, reading.stamps)
