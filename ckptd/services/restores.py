"""Restore sessions: all ranks of a job restore one checkpoint, resolved once and protected by a lease."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

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
    Conflict,
    CorruptObject,
    InvalidName,
    InvalidRequest,
    NoCheckpoint,
    NotFound,
    StoreUnavailable,
    TooManyRequests,
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
    """A session with its computed progress, for display."""

    restore: Restore
    expires_at: float | None
    """When the session expires without further reports; None once it has ended."""
    progress: float | None = None
    stragglers: tuple[int, ...] = ()
    slowest: RankProgress | None = None
    ranks: tuple[RankProgress, ...] | None = None
    """None if the ranks were not read."""


class Restores:
    """Creates, updates and ends restore sessions. Any thread may call any method."""

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

    def join(self, request: RestoreRequest) -> Restore | None:
        """Let a rank join the session of its job; None if there is no session yet. Reads the index only.

        Raises InvalidName, InvalidRequest, or Conflict with the state of the session.
        """
        _check(request)
        found = self._index.find_key(request.run, request.key)
        return self._join(found, request) if found is not None else None

    def open(self, request: RestoreRequest) -> tuple[Restore, bool]:
        """Resolve the checkpoint, take a lease, create a session and join it; False if another caller created it first.

        Session and lease are durable on return. Raises the errors of join, NoCheckpoint, CorruptObject,
        TooManyRequests or Unavailable.
        """
        _check(request)
        if self._index.count_by_state()[RestoreState.RESTORING] >= MAX_LIVE:
            raise TooManyRequests(
                f"{MAX_LIVE} restores are in progress", "Wait, or cancel some: DELETE /v1/restores/{id}"
            )
        restore = self._begin(request)
        found = self._index.create(restore)
        if found.id != restore.id:
            self._leases.release(restore)
        return self._join(found, request), found.id == restore.id

    def report(self, id: str, rank: int, report: RankReport) -> Restore:
        """Record the progress of a rank; durable on return. A session that has ended is returned unchanged.

        Raises NotFound or InvalidRequest.
        """
        now = self._clock()

        def rule(restore: Restore, before: RankProgress | None) -> tuple[Restore, RankProgress | None]:
            _check_rank(rank, restore.world_size)
            return progress.advance(restore, before, rank, report, now)

        return self._announce(id, self._index.change(check_ulid(id), rank, rule))

    def cancel(self, id: str) -> Restore:
        """Cancel a session and release its lease; the state of an ended session is unchanged. Raises NotFound."""
        restore = self._index.end(check_ulid(id), RestoreState.CANCELLED, "", self._clock())
        restore = self._announce(id, restore)
        self._leases.release(restore)
        return restore

    def find(self, id: str) -> Restore:
        """One session. Raises NotFound."""
        return self._known(id, self._index.find(check_ulid(id)))

    def view(self, id: str, with_ranks: bool) -> RestoreView:
        """One session, with its ranks if `with_ranks`. Raises NotFound."""
        restore = self.find(id)
        if with_ranks:
            return self._view_ranks(restore)
        return RestoreView(restore=restore, expires_at=self._expires_at(restore) if restore.live else None)

    def newest(self, run: str | None, limit: int) -> list[RestoreView]:
        """Sessions of one run or all, newest first; live ones with their ranks."""
        found = self._index.newest(check_run(run) if run is not None else None, limit)
        return [
            self._view_ranks(restore) if restore.live else RestoreView(restore=restore, expires_at=None)
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
                self._announce(restore.id, self._index.end(restore.id, RestoreState.EXPIRED, problem, now))

    def forget(self) -> None:
        """Delete sessions that ended long ago."""
        self._index.forget(self._clock() - _KEPT_S, _KEPT_ENDED)

    def _begin(self, request: RestoreRequest) -> Restore:
        now = self._clock()
        id = new_ulid(now)
        for checkpoint in self._candidates(request):
            try:
                lease, until = self._leases.take(checkpoint, id, request.ttl_s)
            except NoCheckpoint:
                continue  # its deletion has just begun
            return Restore(
                id=id,
                run=request.run,
                key=request.key,
                checkpoint=checkpoint,
                world_size=request.world_size,
                ttl_s=request.ttl_s,
                created_at=now,
                lease=lease,
                lease_until=until,
                host=_host(request),
            )
        raise self._not_found(_reference(request))

    def _not_found(self, reference: Reference) -> CkptError:
        """An unmounted volume looks empty: a checkpoint is absent only if the fresh index does not list it either."""
        try:
            known = self._catalog.find(reference)
        except NoCheckpoint as error:
            return error
        # A named checkpoint may have just been deleted; the newest of a run never is.
        if reference.step is not None and reference.run in catalog.list_runs(self._store):
            return NoCheckpoint(f"{known.id} was deleted just now", "Restore another checkpoint")
        return StoreUnavailable(
            f"{self._store.url} does not list {known.id}", "Check that the volume is mounted, then try again"
        )

    def _candidates(self, request: RestoreRequest) -> Iterable[Checkpoint]:
        """Read from the store, because the index may not contain the newest commit yet."""
        reference = _reference(request)
        if reference.step is None:
            return catalog.newest_first(Run(self._store, request.run))
        try:
            found = catalog.find(self._store, reference)
        except NoCheckpoint:
            return []
        if found.state is State.CORRUPT:
            raise CorruptObject(f"{found.id} cannot be restored: {found.problem}", "Restore another checkpoint")
        return [found]

    def _join(self, restore: Restore, request: RestoreRequest) -> Restore:
        _check_same(restore, request)
        now = self._clock()
        host = _host(request)

        def rule(restore: Restore, before: RankProgress | None) -> tuple[Restore, RankProgress | None]:
            joined, rank = progress.join(restore, before, request.rank, now)
            return (replace(joined, host=host) if host and not request.rank and joined.live else joined), rank

        joined = self._index.change(restore.id, request.rank, rule)
        joined = self._known(restore.id, joined)
        if not joined.live:
            problem = f": {joined.problem}" if joined.problem else ""
            raise Conflict(
                f"restore {joined.id} (key {joined.key!r}) of run {joined.run!r} is {joined.state}{problem}",
                "Join with a new key: a key names one restore of a job",
            )
        return joined

    def _view_ranks(self, restore: Restore) -> RestoreView:
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
        """When a live session expires without further reports."""
        since = self._index.oldest_report(restore.id)
        if since is None or restore.num_joined < restore.world_size:
            since = restore.created_at if since is None else min(since, restore.created_at)
        # Ranks could not report while no daemon was running.
        return max(since, self._started_at) + restore.ttl_s

    def _announce(self, id: str, restore: Restore | None) -> Restore:
        restore = self._known(id, restore)
        if not restore.live:
            self._on_end(id)
        return restore

    def _known(self, id: str, restore: Restore | None) -> Restore:
        if restore is None:
            raise NotFound(
                f"there is no restore {id}", "It ended long ago, or the daemon's database was deleted: join again"
            )
        return restore


def _check(request: RestoreRequest) -> None:
    check_run(request.run)
    if not _KEY.fullmatch(request.key):
        raise InvalidName(
            f"key {request.key[:200]!r} is not allowed",
            "Use 1 to 128 letters, digits, '.', '_', ':' or '-', starting with a letter or digit",
        )
    _check_rank(request.rank, request.world_size)
    if _reference(request).run != request.run:
        raise InvalidRequest(
            f"{request.checkpoint} is not a checkpoint of run {request.run!r}", "Name a checkpoint of that run"
        )


def _host(request: RestoreRequest) -> str:
    return request.host.replace("\0", "?")  # PostgreSQL stores no NUL


def _check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise InvalidRequest(f"rank {rank} is not in a world of {world_size} ranks", f"Use 0 to {world_size - 1}")


def _check_same(restore: Restore, request: RestoreRequest) -> None:
    if request.world_size != restore.world_size:
        raise Conflict(
            f"restore {restore.id} has {restore.world_size} ranks, but rank {request.rank} sent {request.world_size}",
            "Use a new key for every restore of a job",
        )
    wanted, got = _reference(request), restore.checkpoint
    if wanted.step not in (None, got.step) or wanted.ulid not in (None, got.attempt.ulid):
        raise Conflict(
            f"restore {restore.id} restores {got.id}, but rank {request.rank} requested {request.checkpoint}",
            "All ranks restore one checkpoint: name the same one, or none",
        )


def _reference(request: RestoreRequest) -> Reference:
    return Reference(request.run, None) if request.checkpoint is None else Reference.parse(request.checkpoint)
