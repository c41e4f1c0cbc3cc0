"""Answers about checkpoints, from the index, as far as it may be believed."""

from __future__ import annotations

from ckptd.index import Index, Position, RunSummary
from ckptd.services.freshness import Freshness
from ckptstore.catalog import Checkpoint
from ckptstore.errors import NoCheckpoint
from ckptstore.names import Reference


class Catalogue:
    """Which checkpoints there are. Raises StoreUnavailable where the index cannot know."""

    def __init__(self, index: Index, freshness: Freshness, store_url: str) -> None:
        self._index = index
        self._freshness = freshness
        self._store_url = store_url

    def ping(self) -> None:
        """Raises IndexUnavailable if the database does not answer."""
        self._index.ping()

    def latest(self, run: str | None) -> Checkpoint:
        """The newest checkpoint of a run; without a run, the one committed last. Raises NoCheckpoint."""
        if run is not None:
            return self.find(Reference(run, None))
        found = self._index.latest()
        self._freshness.check(None, found is not None)
        if found is None:
            raise NoCheckpoint(f"no run has a checkpoint in {self._store_url}", "Is this the right store?")
        return found

    def find(self, reference: Reference) -> Checkpoint:
        """The checkpoint that a reference names. Raises NoCheckpoint."""
        found = self._index.find(reference)
        self._freshness.check(reference.run, found is not None)
        if found is None:
            step = "" if reference.step is None else f" at step {reference.step}"
            raise NoCheckpoint(
                f"run {reference.run!r} has no checkpoint{step} in {self._store_url}",
                "GET /v1/checkpoints shows what there is",
            )
        return found

    def page(self, run: str | None, after: Position | None, limit: int) -> list[Checkpoint]:
        """Checkpoints of one run or all, by run and falling step."""
        found = self._index.page(run, after, limit)
        self._freshness.check(run, bool(found or after))
        return found

    def runs(self) -> list[RunSummary]:
        """All runs, in order."""
        found = self._index.summaries()
        self._freshness.check(None, bool(found))
        return found
