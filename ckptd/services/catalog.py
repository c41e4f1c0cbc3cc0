"""Answers about checkpoints from the index, as long as the index is fresh enough."""

from __future__ import annotations

from ckptapi.listing import Filter, Sort
from ckptd.index import Found, Index, Listing, PageKey, RunSummary
from ckptd.services.freshness import Freshness
from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import NoCheckpoint
from ckptstore.names import Reference
from ckptstore.reading.source import MOST_NAMED, only_run

_ANSWERS_KEPT = 10_000
_HOW = "ckptctl ls, or GET /v1/checkpoints, lists the checkpoints"


class Catalog:
    """The checkpoints in the index. Raises StoreUnavailable if the index may be stale."""

    def __init__(self, index: Index, listing: Listing, freshness: Freshness, store_url: str) -> None:
        self._index = index
        self._listing = listing
        self._freshness = freshness
        self.store_url = store_url
        self._latest: dict[str | None, tuple[int, Checkpoint]] = {}

    def ping(self) -> None:
        """Raises IndexUnavailable if the database does not answer."""
        self._index.ping()

    def latest(self, run: str | None) -> Checkpoint:
        """The newest checkpoint of a run. Raises NoCheckpoint.

        run: may be None if there is only one; otherwise InvalidRequest lists them.
        """
        if known := self.cached_latest(run):
            return known
        # Read the revision before the query: the answer is of that revision or newer.
        revision = self._index.seen
        found = self._latest_of(run) if run is not None else self._only_latest()
        if len(self._latest) >= _ANSWERS_KEPT:
            self._latest.clear()
        self._latest[run] = (revision, found)
        return found

    def _latest_of(self, run: str) -> Checkpoint:
        found = self._index.find(Reference(run, None))
        self._freshness.check(run, found is not None)
        if found is None:
            raise NoCheckpoint(f"run {run!r} has no checkpoint in {self.store_url}", _HOW)
        return found

    def _only_latest(self) -> Checkpoint:
        newest = self._index.latest_of_runs(MOST_NAMED + 1)
        self._freshness.check(None, bool(newest))
        return only_run(newest, self.store_url)

    def cached_latest(self, run: str | None) -> Checkpoint | None:
        """The same without a database query; None if the index has changed since the last query.

        Changes by other daemons are seen after the next `follow`.
        """
        revision, found = self._latest.get(run, (-1, None))
        if found is None or revision != self._index.seen:
            return None
        self._freshness.check(run, found=True)
        return found

    def follow(self) -> None:
        """Check for changes by other daemons. Raises IndexUnavailable."""
        self._index.look()

    def find(self, reference: Reference) -> Checkpoint:
        """The checkpoint that a reference names. Raises NoCheckpoint."""
        found = self._index.find(reference)
        self._freshness.check(reference.run, found is not None)
        if found is None:
            step = "" if reference.step is None else f" at step {reference.step}"
            raise NoCheckpoint(
                f"run {reference.run!r} has no checkpoint{step} in {self.store_url}",
                _HOW,
            )
        return found

    def page(self, wanted: Filter, sort: Sort, after: PageKey | None, limit: int) -> Found:
        """A page of the checkpoints that match a filter, in the given order, after a key."""
        found = self._listing.page(wanted, sort, after, limit)
        self._freshness.check(wanted.one_run, bool(found.checkpoints or after))
        return found

    def runs(self) -> list[RunSummary]:
        """All runs, sorted by name."""
        found = self._index.summaries()
        self._freshness.check(None, bool(found))
        return found
