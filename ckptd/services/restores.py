"""Restore sessions: all ranks of a job restore one checkpoint, which is resolved once and held by a lease."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ckptapi.bodies import RankReport, RestoreRequest, RestoreState
from ckptd.index import RankProgress, Restore, RestoreIndex
from ckptd.services import progress
from ckptd.services.catalog import Catalog
from ckptd.services.restore_leases import RestoreLeases
from ckptstore.clock import Clock
from ckptstore.commits import catalog
from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.errors import (
    CkptError,
    CorruptObject,
    InvalidName,
    InvalidRequest,
    NoCheckpoint,
    NoRestore,
    RestoreEnded,
    RestoreMismatch,
    StoreUnavailable,
    TooManyRestores,
)
from ckptstore.names import Reference, check_run, check_ulid, new_ulid
from ckptstore.run import Run
from ckptstore.stores import Store

MAX_LIVE = 1000
_KEPT_S = 24 * 3600.0
_KEPT_ENDED = 1000
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreView:
    """A session as people look at it."""

    restore: Restore
    expires_at: float | None
    """When it expires if nobody reports any more; None once it ended."""
    progress: float | None = None
    stragglers: tuple[int, ...] = ()
    slowest: RankProgress | None = None
    ranks: tuple[RankProgress, ...] | None = None
    """None: they were not looked at."""


class Restores:
    """Joins, reports, ends. Any thread may call any method."""

    def __init__(
        self,
        store: Store,
        catalog: Catalog,
        index: RestoreIndex,
        leases: RestoreLeases,
        clock: Clock,
        on_end: Callable[[str], None],
    ) -> None:
        """on_end: called with the id of a session that has ended, from any thread, sometimes more than once."""
        self._store = store
        self._catalog = catalog
        self._index = index
        self._leases = leases
        self._clock = clock
        self._on_end = on_end
        self._started_at = clock()

    def join(self, asked: RestoreRequest) -> Restore | None:
        """Let a rank join the session of its job; None if there is none yet. Asks the index only.

        Raises InvalidName, InvalidRequest, RestoreMismatch, or RestoreEnded with what became of it.
        """
        _check(asked)
        found = self._index.find_key(asked.run, asked.key)
        return self._join(found, asked) if found is not None else None

    def open(self, asked: RestoreRequest) -> tuple[Restore, bool]:
        """Resolve the checkpoint, take a lease, begin a session and join it; False if another caller was faster.

        Session and lease are durable on return. Raises what join raises, NoCheckpoint, CorruptObject, TooManyRestores
        or Unavailable.
        """
        _check(asked)
        if self._index.count_by_state()[RestoreState.RESTORING] >= MAX_LIVE:
            raise TooManyRestores(
                f"{MAX_LIVE} restores are under way", "Wait, or cancel some: DELETE /v1/restores/{id}"
            )
        restore = self._begin(asked)
        found = self._index.create(restore)
        if found.id != restore.id:
            self._leases.release(restore)
        return self._join(found, asked), found.id == restore.id

    def report(self, id: str, rank: int, report: RankReport) -> Restore:
        """Note how far a rank is; durable on return. A session that has ended is returned as it ended.

        Raises NoRestore or InvalidRequest.
        """
        now = self._clock()

        def rule(restore: Restore, before: RankProgress | None) -> tuple[Restore, RankProgress | None]:
            _check_rank(rank, restore.world_size)
            return progress.advance(restore, before, rank, report, now)

        return self._told(id, self._index.change(check_ulid(id), rank, rule))

    def cancel(self, id: str) -> Restore:
        """End a session and release its lease; one that has ended stays as it ended. Raises NoRestore."""
        restore = self._index.end(check_ulid(id), RestoreState.CANCELLED, "", self._clock())
        restore = self._told(id, restore)
        self._leases.release(restore)
        return restore

    def find(self, id: str) -> Restore:
        """One session. Raises NoRestore."""
        return self._known(id, self._index.find(check_ulid(id)))

    def view(self, id: str, with_ranks: bool) -> RestoreView:
        """One session, if asked for with its ranks. Raises NoRestore."""
        restore = self.find(id)
        if with_ranks:
            return self._look_at_ranks(restore)
        return RestoreView(restore=restore, expires_at=self._expires_at(restore) if restore.live else None)

    def newest(self, run: str | None, limit: int) -> list[RestoreView]:
        """Sessions of one run or all, newest first; at the ranks of those that are under way."""
        found = self._index.newest(check_run(run) if run is not None else None, limit)
        return [
            self._look_at_ranks(restore) if restore.live else RestoreView(restore=restore, expires_at=None)
            for restore in found
        ]

    def watch(self) -> None:
        """End sessions with a silent rank. For one background thread."""
        now = self._clock()
        for restore in self._index.live():
            if self._expires_at(restore) > now:
                continue
            problem = progress.silence(restore, self._index.ranks(restore.id), now, self._started_at)
            if problem:
                self._told(restore.id, self._index.end(restore.id, RestoreState.EXPIRED, problem, now))

    def forget(self) -> None:
        """Drop sessions that ended long ago."""
        self._index.forget(self._clock() - _KEPT_S, _KEPT_ENDED)

    def _begin(self, asked: RestoreRequest) -> Restore:
        now = self._clock()
        id = new_ulid(now)
        for checkpoint in self._candidates(asked):
            try:
                lease, until = self._leases.take(checkpoint, id, asked.ttl_s)
            except NoCheckpoint:
                continue  # its deletion began in this moment
            return Restore(
                id=id,
                run=asked.run,
                key=asked.key,
                checkpoint=checkpoint,
                world_size=asked.world_size,
                ttl_s=asked.ttl_s,
                created_at=now,
                lease=lease,
                lease_until=until,
            )
        raise self._none_left(_reference(asked))

    def _none_left(self, reference: Reference) -> CkptError:
        """An unmounted volume looks like an empty one: none is what the index, just listed, does not know either."""
        try:
            known = self._catalog.find(reference)
        except NoCheckpoint as error:
            return error
        # A checkpoint that is named may have been deleted since; the newest of a run never is.
        if reference.step is not None and reference.run in catalog.list_runs(self._store):
            return NoCheckpoint(f"{known.id} was deleted just now", "Restore another checkpoint")
        return StoreUnavailable(f"{self._store.url} does not list {known.id}", "Is the volume mounted? Then try again")

    def _candidates(self, asked: RestoreRequest) -> Iterable[Checkpoint]:
        """From the store itself: a commit counts from the moment it is made, not from when the index has it."""
        reference = _reference(asked)
        if reference.step is None:
            return catalog.newest_first(Run(self._store, asked.run))
        try:
            found = catalog.find(self._store, reference)
        except NoCheckpoint:
            return []
        if found.state is State.CORRUPT:
            raise CorruptObject(f"{found.id} cannot be restored: {found.problem}", "Restore another checkpoint")
        return [found]

    def _join(self, restore: Restore, asked: RestoreRequest) -> Restore:
        _check_same(restore, asked)
        now = self._clock()
        joined = self._index.change(
            restore.id, asked.rank, lambda current, before: progress.join(current, before, asked.rank, now)
        )
        joined = self._known(restore.id, joined)
        if not joined.live:
            problem = f": {joined.problem}" if joined.problem else ""
            raise RestoreEnded(
                f"restore {joined.id} (key {joined.key!r}) of run {joined.run!r} is {joined.state}{problem}",
                "Join with a new key: a key names one restore of a job",
            )
        return joined

    def _look_at_ranks(self, restore: Restore) -> RestoreView:
        ranks = self._index.ranks(restore.id)
        return RestoreView(
            restore=restore,
            expires_at=self._expires_at(restore) if restore.live else None,
            progress=progress.mean(restore, ranks),
            stragglers=tuple(progress.stragglers(restore, ranks, self._clock())),
            slowest=progress.slowest(ranks) if restore.live else None,
            ranks=tuple(ranks),
        )

    def _expires_at(self, restore: Restore) -> float:
        """When a live session expires if nobody reports any more."""
        since = self._index.oldest_report(restore.id)
        if since is None or restore.num_joined < restore.world_size:
            since = restore.created_at if since is None else min(since, restore.created_at)
        # While no daemon was there, nobody could report.
        return max(since, self._started_at) + restore.ttl_s

    def _told(self, id: str, restore: Restore | None) -> Restore:
        restore = self._known(id, restore)
        if not restore.live:
            self._on_end(id)
        return restore

    def _known(self, id: str, restore: Restore | None) -> Restore:
        if restore is None:
            raise NoRestore(
                f"there is no restore {id}", "It ended long ago, or the daemon's database was deleted: join again"
            )
        return restore


def _check(asked: RestoreRequest) -> None:
    check_run(asked.run)
    if not _KEY.fullmatch(asked.key):
        raise InvalidName(
            f"key {asked.key[:200]!r} is not allowed",
            "Use 1 to 128 letters, digits, '.', '_', ':' or '-', starting with a letter or digit",
        )
    _check_rank(asked.rank, asked.world_size)
    if _reference(asked).run != asked.run:
        raise InvalidRequest(
            f"{asked.checkpoint} is not a checkpoint of run {asked.run!r}", "A restore stays within its run"
        )


def _check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise InvalidRequest(f"rank {rank} is not one of {world_size}", f"Use 0 to {world_size - 1}")


def _check_same(restore: Restore, asked: RestoreRequest) -> None:
    if asked.world_size != restore.world_size:
        raise RestoreMismatch(
            f"restore {restore.id} has {restore.world_size} ranks, rank {asked.rank} says {asked.world_size}",
            "Use a new key for every restore of a job",
        )
    wanted, got = _reference(asked), restore.checkpoint
    if wanted.step not in (None, got.step) or wanted.ulid not in (None, got.attempt.ulid):
        raise RestoreMismatch(
            f"restore {restore.id} is of {got.id}, rank {asked.rank} wants {asked.checkpoint}",
            "All ranks restore one checkpoint; leave it open, or name the same",
        )


def _reference(asked: RestoreRequest) -> Reference:
    return Reference(asked.run, None) if asked.checkpoint is None else Reference.parse(asked.checkpoint)
