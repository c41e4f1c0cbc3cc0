"""Answers about checkpoints from the index, as long as the index is fresh enough."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ckptapi.listing import Filter, Sort
from ckptd.index import Found, Index, Listing, PageKey, RunSummary
from ckptstore.clock import Clock
from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.errors import CkptError, Damaged, IndexUnavailable, NoCheckpoint, StoreUnavailable
from ckptstore.names import Reference, check_run
from ckptstore.reading.source import MOST_NAMED, only_run

_ANSWERS_KEPT = 10_000
_HOW = "ckptctl ls, or GET /v1/checkpoints, lists the checkpoints"


@dataclass
class Catalog:
    """The checkpoints in the index. Raises StoreUnavailable if the index may be stale."""

    _index: Index
    _listing: Listing
    _freshness: Freshness
    store_url: str
    _latest: dict[str | None, tuple[tuple[int, int], Checkpoint]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stored_over_time = self._index.stored_over_time
        self.follow = self._index.look
        """Checks for changes by other daemons. Raises IndexUnavailable."""

    def latest(self, run: str | None) -> Checkpoint:
        """The newest checkpoint of a run. Raises NoCheckpoint.

        run: may be None if there is only one; otherwise InvalidRequest lists them.
        """
        if known := self.cached_latest(run):
            return known
        # Read the revision before the query: the answer is of that revision or newer.
        revision = self._index.seen
        found = self.find(Reference(run, None)) if run is not None else self._only_latest()
        if len(self._latest) >= _ANSWERS_KEPT:
            self._latest.clear()
        self._latest[run] = (revision, found)
        return found

    def _only_latest(self) -> Checkpoint:
        newest = self._index.latest_of_runs(MOST_NAMED + 1)
        self._freshness.check(None, bool(newest))
        return only_run(newest, self.store_url)

    def cached_latest(self, run: str | None) -> Checkpoint | None:
        """The same without a database query; None if the index has changed since the last query.

        Changes by other daemons are seen after the next `follow`.
        """
        revision, found = self._latest.get(run, (None, None))
        if found is None or revision != self._index.seen:
            return None
        self._freshness.check(run, found=True)
        return found

    def find(self, reference: Reference) -> Checkpoint:
        """The checkpoint that a reference names. Raises NoCheckpoint."""
        found = self._index.find(reference)
        self._freshness.check(reference.run, found is not None)
        if found is None:
            raise NoCheckpoint(f"{reference.missing} in {self.store_url}", _HOW)
        return found

    def page(self, wanted: Filter, sort: Sort, after: PageKey | None, limit: int) -> Found:
        """A page of the checkpoints that match a filter, in the given order, after a key."""
        found = self._listing.page(wanted, sort, after, limit)
        self._freshness.check(wanted.one_run, bool(found.checkpoints or after))
        return found

    def newest(self, run: str, limit: int, *states: State) -> list[Checkpoint]:
        """The checkpoints of a run, newest step first, of all states or of some. Raises InvalidName."""
        wanted = Filter(run=check_run(run), states=frozenset(states))
        return self.page(wanted, Sort.RUN, None, limit).checkpoints

    def runs(self) -> list[RunSummary]:
        """All runs, sorted by name."""
        found = self._index.summaries()
        self._freshness.check(None, bool(found))
        return found


@dataclass
class Freshness:
    """Results of the last listings of the store. Any thread may call any method."""

    _clock: Clock
    _stale_after_s: float

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self.started_at = self._clock()
        self._succeeded_at: float | None = None
        self._listed_at: float | None = None
        self._synced: set[str] = set()
        self._failures: dict[str | None, CkptError] = {}

    def report(self, began_at: float, runs: Collection[str], failures: Mapping[str, CkptError]) -> None:
        """Record a round that began at `began_at` and listed the store; some runs may have failed."""
        with self._lock:
            self._listed_at = began_at
            self._synced = (self._synced & set(runs)) | (set(runs) - failures.keys())
            self._failures = dict(failures.items())
            if not failures:
                self._succeeded_at = began_at

    def report_failure(self, error: CkptError) -> None:
        """Record a round that could not list the runs."""
        with self._lock:
            self._failures = {None: error}

    def lag_s(self) -> float:
        """Seconds since the index was last known to equal the store, or since the start."""
        with self._lock:
            return max(0.0, self._clock() - (self._succeeded_at or self.started_at))

    def problem(self) -> str:
        """Why the index does not equal the store now; empty if it does."""
        with self._lock:
            doubt = self._doubt(None, found=False)
        return doubt.message if doubt else ""

    def check(self, run: str | None, found: bool) -> None:
        """Raise if the index cannot answer a query for `run` (None: for all runs).

        found: whether the index has a result. A result is valid once the run has been read completely. An empty
        result is valid only if the last listing succeeded, and recently. Raises StoreUnavailable, or an error that a
        retry cannot fix, such as UnsupportedFormat: skipping an unreadable checkpoint would resume from the wrong step.
        """
        with self._lock:
            doubt = self._doubt(run, found)
        if doubt is not None:
            kind = type(doubt) if isinstance(doubt, Damaged | IndexUnavailable | StoreUnavailable) else StoreUnavailable
            raise kind(doubt.message, doubt.hint or "The index may be stale: wait until GET /readyz reports ready")

    def _doubt(self, run: str | None, found: bool) -> CkptError | None:
        failures = {name: error for name, error in self._failures.items() if run is None or name in (None, run)}
        for name, error in failures.items():
            once_read = self._listed_at is not None and (name is None or name in self._synced)
            if isinstance(error, Damaged) or not (found and once_read):
                return error
        if self._listed_at is None:
            return StoreUnavailable("the store has not been listed yet")
        age = self._clock() - self._listed_at
        if age > self._stale_after_s and not found:
            return StoreUnavailable(f"the store was last listed {age:.0f} s ago")
        return None
