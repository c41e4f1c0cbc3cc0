"""Keeps the index equal to the store: by periodic listings, by notifications, or by reading everything again.

A checkpoint is removed from the index only if a successful listing lacks it and its run still exists. Results are
written only if the run has not been changed meanwhile, by this daemon or by another one that shares the index.
Otherwise they may be outdated, and the run is read again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import NamedTuple
from zlib import crc32

from ckptd.index import BegunGeneration, Index, IndexedAttempts, Reading, RunChanged, Stamp
from ckptd.metrics import Metrics
from ckptd.services.catalog import Freshness
from ckptstore import names
from ckptstore.clock import Clock
from ckptstore.commits.catalog import (
    Checkpoint,
    State,
    list_runs,
    quarantined_attempts,
    read_decided,
)
from ckptstore.commits.generations import list_generations, read_generations
from ckptstore.commits.hidden import HiddenAttempts, hidden_attempts, without_hidden
from ckptstore.commits.labels import label_versions, labelled, newest_labels, with_labels
from ckptstore.errors import (
    AttemptAborted,
    CkptError,
    IndexUnavailable,
    InvalidName,
    NoCheckpoint,
    StoreUnavailable,
)
from ckptstore.names import Attempt, checkpoint_id
from ckptstore.run import Run
from ckptstore.stores import Store
from ckptstore.threads import in_parallel

_LOG = logging.getLogger(__name__)
_LISTERS = 4
_BATCH = 1000
"""Outcomes per write to the index, so that an interrupted first read resumes."""
_TRIES = 10
IDLE_AFTER_S = 600.0
IDLE_ROUNDS = 6


class _Listing(NamedTuple):
    """The listing of one run."""

    outcomes: Mapping[Attempt, Stamp]
    """Newest step first, hidden ones included: lists of deleted attempts are not read until something has changed."""
    hidden: HiddenAttempts
    damaged: frozenset[Attempt]
    labels: Mapping[Attempt, int]
    """The newest label version of each attempt that has labels."""
    generations: Mapping[int, Stamp]
    fingerprint: int

    def visible(self) -> _Listing:
        """Without hidden attempts."""
        left = without_hidden(self.outcomes.keys(), self.hidden)
        return self._replace(outcomes={attempt: self.outcomes[attempt] for attempt in left})


class PollPlan:
    """Selects the runs that a round lists: those that changed in the last ten minutes, and others every sixth round.

    For one thread. Listings cost time and money: thousands of ended runs must not slow down the active ones.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rounds = count()
        self._changed: dict[str, tuple[int, float]] = {}

    def due(self, versions: Mapping[str, int]) -> list[str]:
        """The runs to list in this round. versions: of all runs. A run seen for the first time is due."""
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


@dataclass
class StoreSync:
    """Reads the store and writes the index. `run_once` is for one background thread, the rest for any."""

    _store: Store
    _index: Index
    _freshness: Freshness
    _metrics: Metrics
    _clock: Clock
    _equal: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Fingerprint and version of runs whose index was found equal to the store."""
    answers: bool | None = None
    """Whether the last listing of the store succeeded, and queries are answered; None: there was none yet."""

    def __post_init__(self) -> None:
        self._poll_plan = PollPlan(self._clock)
        self._failed: set[str] = set()
        self._lock = threading.Lock()

    def run_once(self) -> None:
        """List the runs that are due, and update the index. Never raises CkptError."""
        began_at = self._clock()
        try:
            versions = self._list_runs()
        except CkptError as error:
            self._count(error, logging.DEBUG if self.answers is False else logging.WARNING)  # once per outage
            self.answers = False
            self._freshness.report_failure(error)
            return
        if self.answers is False:
            _LOG.warning("%s answers again, after %.0f s", self._store.url, self._freshness.lag_s())
        due = sorted({*self._poll_plan.due(versions), *(self._failed & versions.keys())})
        results = in_parallel(lambda run: self._try(run, versions[run]), due, _LISTERS)
        failures = {run: error for run, error in zip(due, results, strict=True) if error is not None}
        self._failed = set(failures)
        self._freshness.report(began_at, versions, failures)
        self.answers = True

    def sync_run(self, run: str, reread: bool = False) -> None:
        """Make the index of one run equal to the store. reread: also read outcomes that are indexed already."""
        done: set[Attempt] = set()
        stalled = 0
        while stalled < _TRIES:
            before = len(done)
            try:
                # Read the index before the store: a commit notified in between must not look like a deletion.
                known = self._index.attempts(run)
                self._update(run, known, self._list(run).visible(), reread, done)
                return
            except RunChanged:
                stalled = 0 if len(done) > before else stalled + 1
        raise IndexUnavailable(f"run {run!r} changes faster than it can be read", "Try again")

    def notify(self, run: str, attempt: Attempt) -> Checkpoint:
        """Index an attempt if it is committed in the store; the notification itself is not trusted.

        Raises NoCheckpoint if it is not committed or is being deleted, AttemptAborted, or Unavailable.
        """
        one = self._run(run)
        for _ in range(_TRIES):
            version = self._index.version(run)
            hidden = hidden_attempts(one)
            found = read_decided(one, attempt, quarantined_attempts(one), hidden.thinned)
            if isinstance(found, Attempt):
                raise AttemptAborted(f"attempt {attempt} of run {run!r} was aborted", "Save again")
            if found is None or attempt in hidden:
                raise NoCheckpoint(
                    f"{checkpoint_id(run, attempt)} is not committed in {self._store.url}",
                    "Notify after the commit; does the daemon serve the store that the trainer writes to?",
                )
            [found] = with_labels(one, [found])
            begun = _read_generations(one, {attempt.generation: None} if attempt.generation else {})
            try:
                self._index.apply(run, Reading([found], generations=begun), version)
            except RunChanged:
                continue
            return found
        raise IndexUnavailable(f"run {run!r} changes faster than it can be read", "Try again")

    def reindex(self) -> tuple[int, int]:
        """Read every outcome again. Returns the numbers of runs and checkpoints.

        Only this method accepts an empty store. Raises Unavailable; runs that were read until then stay indexed.
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
        """The runs of the store with their versions in the index, 0 for new ones; drops deleted runs from the index."""
        known = self._index.versions()
        runs = list_runs(self._store)
        if known and not runs:
            raise StoreUnavailable(
                f"{self._store.url} lists no runs, but had {len(known)} before: is the volume mounted?",
                "If it was emptied on purpose, POST /v1/reindex",
            )
        self._forget(known, runs)
        return {run: known.get(run, 0) for run in runs}

    def _forget(self, known: Mapping[str, int], listed: Collection[str]) -> None:
        # The index was read before the store here too: a run notified in between has another version.
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
        one = self._run(run)
        # List outcomes first: a checkpoint hidden in between already has its tombstone.
        outcomes = list(self._store.list(one.keys.commits))
        hidden = hidden_attempts(one)
        damaged = quarantined_attempts(one)
        labels = {attempt: versions[-1] for attempt, versions in label_versions(one).items()}
        stamps: dict[Attempt, Stamp] = {}
        for info in reversed(outcomes):
            try:
                attempt = names.attempt_and_name(info.key)[0]
            except InvalidName:
                continue  # not written by ckptd
            stamps[attempt] = Stamp(info.bytes, info.modified_at, labels.get(attempt, 0))
        begun = list_generations(one)
        fingerprint = hash(
            (
                *outcomes,
                hidden.tombstoned,
                hidden.thinned,
                *hidden.deleted.listed,
                None,
                *damaged,
                None,
                *labels.items(),
                *begun.values(),
            )
        )
        generations = {number: Stamp(info.bytes, info.modified_at) for number, info in begun.items()}
        return _Listing(stamps, hidden, frozenset(damaged), labels, generations, fingerprint)

    def _update(self, run: str, known: IndexedAttempts, listing: _Listing, reread: bool, done: set[Attempt]) -> None:
        """Read new outcomes and index them in batches. done: attempts indexed so far, including earlier tries."""
        indexed = {**known.checkpoints, **known.aborted}
        gone = [attempt for attempt in indexed if attempt not in listing.outcomes]
        if gone:
            self._still_there(run)
        # Attempts that look corrupt are read every time, but only changes are written.
        suspect = known.corrupt ^ (listing.damaged & known.checkpoints.keys())
        suspect |= known.thinned ^ (listing.hidden.thinned & known.checkpoints.keys())
        unread = [
            attempt
            for attempt, stamp in listing.outcomes.items()
            if attempt not in done and (reread or attempt in suspect or indexed.get(attempt) != stamp)
        ]
        version = known.version
        changed_generations = {
            number: stamp
            for number, stamp in listing.generations.items()
            if reread or known.generations.get(number) != stamp
        }
        lost = [number for number in known.generations if number not in listing.generations]
        if changed_generations or lost:
            begun = _read_generations(self._run(run), changed_generations)
            version = self._index.apply(run, Reading(generations=begun, lost_generations=lost), version)
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
            raise StoreUnavailable(
                f"{self._store.url} lost run {run!r} while it was listed", "Check that the volume is mounted"
            )

    def _read_all(self, run: str, attempts: Collection[Attempt], gone: list[Attempt], listing: _Listing) -> Reading:
        results = in_parallel(partial(_read_labelled, self._run(run), listing), attempts)
        vanished = [attempt for attempt, result in zip(attempts, results, strict=True) if result is None]
        return Reading(
            found=[result for result in results if isinstance(result, Checkpoint)],
            aborted=[result for result in results if isinstance(result, Attempt)],
            gone=[*gone, *vanished],
            stamps=listing.outcomes,
        )

    def _run(self, name: str) -> Run:
        return Run(self._store, name, self._clock)

    def _count(self, error: CkptError, level: int = logging.WARNING) -> None:
        _LOG.log(level, "cannot synchronize with the store: %s", error)
        self._metrics.count_store_error("sync", error)


def _read_generations(run: Run, stamps: Mapping[int, Stamp | None]) -> list[BegunGeneration]:
    found = read_generations(run, stamps)
    return [
        BegunGeneration(
            number=number,
            parent=document.parent if document is not None else None,
            readable=document is not None,
            stamp=stamp,
        )
        for number, stamp in stamps.items()
        for document in [found[number]]
    ]


def _read_labelled(run: Run, listing: _Listing, attempt: Attempt) -> Checkpoint | Attempt | None:
    found = read_decided(run, attempt, listing.damaged, listing.hidden.thinned)
    if not isinstance(found, Checkpoint) or attempt not in listing.labels:
        return found
    return labelled(found, newest_labels(run, attempt, listing.labels[attempt]))


def _without(reading: Reading, known: IndexedAttempts) -> Reading:
    """The reading without corrupt checkpoints that are indexed and unchanged."""
    found = [
        c
        for c in reading.found
        if c.state is not State.CORRUPT
        or c.attempt not in known.corrupt
        or known.checkpoints[c.attempt] != reading.stamps.get(c.attempt)
    ]
    return reading._replace(found=found)
