"""TieredSource: what a local tier and a remote store hold together, as one source.

An attempt has the same name and the same bytes in both, so every read may be answered by either; the local one is asked
first. The lineage is that of both together: the remote store's, continued by generations that are only local yet. Those
that were begun there after another trainer had continued the run are abandoned.

While the remote store is away, what is local is all there is. If nothing is local, that is an error: the remote store
may have checkpoints.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from typing_extensions import override

from ckptstore.commits.catalog import (
    Checkpoint,
    State,
    decided_attempts,
    list_checkpoints,
    named,
    quarantined_attempts,
    read_checkpoint,
    visible_attempts,
    walk,
    with_parents,
    with_states,
)
from ckptstore.commits.generations import Lineage, list_generations, read_generations
from ckptstore.commits.hidden import hidden_attempts, without_hidden
from ckptstore.commits.labels import with_labels
from ckptstore.errors import CkptError, Damaged, NoCheckpoint, ObjectMissing, Unavailable
from ckptstore.format.documents import digest
from ckptstore.format.parsing import is_sealed
from ckptstore.format.statistics import SideDocument
from ckptstore.names import Attempt, Reference, checkpoint_id
from ckptstore.reading.source import StoreSource
from ckptstore.run import Run
from ckptstore.stores import ObjectReader, Store
from ckptstore.tiers.replication import Generations, seen_generation, unseen

logger = logging.getLogger(__name__)

LOCAL, REMOTE = "local", "remote"
_T = TypeVar("_T")
_Seen = dict[Attempt, tuple[Collection[Attempt], Collection[Attempt]]]
"""The visible attempts of a store, each with all that are in quarantine, and all that are thinned, there."""
_AWAY_S = 10.0
_BOTH = "+"
"""Between the leases that a reader has in the two stores."""


class TieredSource(StoreSource):
    """Reads from two stores. `store` is the remote one. For any thread."""

    def __init__(self, local: Store, remote: Store, patient: Store) -> None:
        """patient: the remote store again, with requests that are repeated: for what is not local."""
        super().__init__(patient)
        self.local = StoreSource(local)
        self._quick = StoreSource(remote)
        self._patient = StoreSource(self.store)
        self._tiers = {LOCAL: self.local, REMOTE: self._quick}
        self._away_until = 0.0

    @override
    def runs(self) -> list[str]:
        return sorted({*self.local.runs(), *self._remote(None, StoreSource.runs, list[str]())})

    def checkpoints(self, run: str) -> list[Checkpoint]:
        """Reads all outcomes of both stores."""
        found: dict[Attempt, Checkpoint] = {}
        for tier, listed in zip(self._tiers, self._both(run, list_checkpoints, list[Checkpoint]()), strict=True):
            for one in listed:
                known = found.get(one.attempt, one)
                better = one if known.state is State.CORRUPT else known
                found[one.attempt] = replace(better, tiers=(*known.tiers, tier))
        generations, stray = self._generations(run)
        merged = [found[attempt] for attempt in sorted(found, reverse=True)]
        live = [replace(c, state=State.COMMITTED) if c.state is not State.CORRUPT else c for c in merged]
        own = [c for c in live if REMOTE in c.tiers or c.attempt.generation not in stray]
        states = {c.attempt: c for c in with_states(own, Lineage(generations.get))}
        listed = [states.get(c.attempt) or replace(c, state=State.ABANDONED) for c in live]
        return self._with_labels(run, with_parents(listed, generations.get))

    @override
    def candidates(self, run: str) -> Iterator[Checkpoint]:
        listed, remote = self._both(run, _visible, _Seen())
        generations, stray = self._generations(run)
        local = {a: found for a, found in listed.items() if a in remote or a.generation not in stray}
        left = max(listed.keys() - local.keys(), default=None)
        if left is not None:
            logger.warning(
                "%s and others that are only local are not restored unless they are named: another trainer has "
                "continued run %r in %s", checkpoint_id(run, left), run, self.url,
            )  # fmt: skip
        return walk(
            sorted({*local, *remote}, reverse=True),
            partial(self._load, run, {LOCAL: local, REMOTE: remote}),
            generations.get,
        )

    def latest(self, run: str | None = None) -> Checkpoint:
        """Reads outcomes of one run of both stores; of all runs only those that are remote."""
        if run is None:
            return super().latest()
        for checkpoint in self.candidates(run):
            if checkpoint.state is State.COMMITTED:
                return self._with_labels(run, [checkpoint])[0]
        raise NoCheckpoint(
            f"run {run!r} has no checkpoint in {self.local.url} and {self.url}",
            "The first save may not have finished yet. Otherwise check the names of the run and the stores",
        )

    def find(self, reference: Reference) -> Checkpoint:
        """Reads all outcomes of the run."""
        if reference.newest:
            return self.latest(reference.run)
        listed = self.checkpoints(reference.run)
        if reference.name is not None:
            return named(listed, reference, self.url)
        meant = [c for c in listed if reference.means(c.attempt)]
        if not meant:
            raise NoCheckpoint(
                f"{reference.missing} in {self.local.url} and {self.url}",
                "ckptctl ls shows what there is",
            )
        return min(meant, key=lambda c: (c.state is State.ABANDONED, c.state is State.CORRUPT))

    def newest_generation(self, run: str) -> int:
        """The newest generation of the remote store; 0 if it has none, or is away."""
        return self._remote(run, lambda remote: max(list_generations(remote.run(run)), default=0), 0)

    def is_local(self, run: str | None) -> bool:
        """Whether the local tier has checkpoints of the run, or of any run for None."""

        local = self.local
        return self._local(lambda: bool(local.runs() if run is None else visible_attempts(local.run(run))), False)

    def remote_or_local(self, checkpoint: Checkpoint) -> StoreSource:
        """The remote store, or `local` if the checkpoint is only there."""
        return self.local if checkpoint.tiers == (LOCAL,) else self._patient

    def manifest_data(self, checkpoint: Checkpoint) -> bytes:
        """One read, or two if the local tier has not the right bytes."""
        return self._first(
            lambda one: one.manifest_data(checkpoint), lambda data: digest(data) == checkpoint.manifest_digest
        )

    def receipt_data(self, checkpoint: Checkpoint, rank: int) -> bytes:
        """One read, or two if the local tier has not the right bytes."""
        return self._first(lambda one: one.receipt_data(checkpoint, rank), is_sealed)

    def statistics_data(self, checkpoint: Checkpoint, rank: int, side: SideDocument) -> bytes:
        """One read, or two if the local tier has not the right bytes."""
        return self._first(
            lambda one: one.statistics_data(checkpoint, rank, side), lambda data: digest(data) == side.digest
        )

    def open_shard(self, checkpoint: Checkpoint, shard: str) -> ObjectReader:
        """A reader of the local tier, if it has the shard."""
        with suppress(ObjectMissing, Unavailable):
            return self.local.open_shard(checkpoint, shard)
        return super().open_shard(checkpoint, shard)

    def take_lease(self, checkpoint: Checkpoint, holder: str, ttl_s: float) -> str:
        """In each store that has the checkpoint and answers. Raises NoCheckpoint if none could be taken."""
        taken = dict.fromkeys(self._tiers, "")
        error: CkptError | None = None
        for tier, source in self._tiers.items():
            if tier in checkpoint.tiers:
                try:
                    taken[tier] = source.take_lease(checkpoint, holder, ttl_s)
                except (NoCheckpoint, Unavailable) as caught:
                    error = error or caught
        if error is not None and not any(taken.values()):
            raise error
        return _BOTH.join(taken.values())

    @override
    def release_lease(self, run: str, lease: str) -> None:
        for tier, source in self._tiers.items():
            if part := part_of_lease(lease, tier):
                source.release_lease(run, part)

    def _generations(self, run: str) -> tuple[Generations, set[int]]:
        """The generations of both stores, the remote one's first; and those of which nothing more is replicated."""
        local, remote = self._both(run, read_generations, Generations())
        newest = max(unseen(local, remote), default=0)
        return {**local, **remote}, {number for number in local if seen_generation(local, number) < newest}

    def _load(self, run: str, seen: dict[str, _Seen], attempt: Attempt) -> Checkpoint | None:
        tiers = tuple(tier for tier in self._tiers if attempt in seen[tier])
        best: Checkpoint | None = None
        for tier in tiers:
            try:
                found = read_checkpoint(self._tiers[tier].run(run), attempt, *seen[tier][attempt])
            except Unavailable as error:
                if tier == tiers[-1]:
                    raise
                logger.warning("reading without the local tier: %s", error)
                continue
            if found is not None:
                best = replace(found, tiers=tiers)
                if best.state is not State.CORRUPT:
                    break
        return best

    def _first(self, read: Callable[[StoreSource], bytes], right: Callable[[bytes], bool]) -> bytes:
        with suppress(ObjectMissing, Unavailable, Damaged):
            if right(data := read(self.local)):
                return data
        return read(self._patient)

    def _with_labels(self, run: str, listed: list[Checkpoint]) -> list[Checkpoint]:
        for tier, source in reversed(self._tiers.items()):
            there = {c.attempt: c for c in listed if tier in c.tiers and not c.tags}
            with suppress(Unavailable):
                found = {c.attempt: c for c in with_labels(source.run(run), list(there.values()))}
                listed = [found.get(c.attempt, c) for c in listed]
        return listed

    def _both(self, run: str, read: Callable[[Run], _T], otherwise: _T) -> tuple[_T, _T]:
        """The listings of a run in the local tier and in the remote one."""
        local = self._local(lambda: read(self.local.run(run)), otherwise)
        return local, self._remote(run, lambda remote: read(remote.run(run)), otherwise)

    def _local(self, read: Callable[[], _T], otherwise: _T) -> _T:
        try:
            return read()
        except Unavailable as error:
            logger.warning("reading without the local tier: %s", error)
            return otherwise

    def _remote(self, run: str | None, read: Callable[[StoreSource], _T], otherwise: _T) -> _T:
        """The listing of the remote store. If it is away: `otherwise`, if the local one has checkpoints; else it is
        asked again.

        It counts as away for a moment, so that a time-out is not waited for at each request.
        """
        if time.monotonic() >= self._away_until:
            try:
                return read(self._quick)
            except Unavailable as error:
                self._away_until = time.monotonic() + _AWAY_S
                logger.warning("the remote store is away: %s", error)
        return otherwise if self.is_local(run) else read(self._patient)


def _visible(run: Run) -> _Seen:
    decided, hidden = decided_attempts(run), hidden_attempts(run)
    visible = without_hidden(decided, hidden)
    return dict.fromkeys(visible, (quarantined_attempts(run) if visible else (), hidden.thinned))


def part_of_lease(lease: str, tier: str) -> str:
    """The lease in one of the stores; empty if there is none. Pure."""
    local, _, remote = lease.partition(_BOTH)  # of a single store, all is before it
    return local if tier == LOCAL else remote
