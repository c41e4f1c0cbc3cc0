"""Restore sessions: all ranks of a job restore one checkpoint, resolved once and protected by a lease.

Restores: sessions begin, change and end. RestoreLeases: a lease is renewed while its session is live. Functions: what
the reports of the ranks mean. Pure.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from msgspec.structs import replace

from ckptapi.bodies import CheckpointBody, Phase, RankBody, RankReport, RestoreBody, RestoreRequest, RestoreState
from ckptd.index import Restore, RestoreIndex
from ckptd.metrics import Metrics
from ckptd.services.catalog import Catalog
from ckptstore.clock import Clock
from ckptstore.commits import catalog
from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.commits.labels import find
from ckptstore.commits.leases import release_lease, renew_lease, take_lease
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


_FIELDS = set(Restore.__struct_fields__) - {"checkpoint", "done_bytes", "total_bytes"}
_SAME = [name for name in RestoreBody.__struct_fields__ if name in _FIELDS]
"""Fields that a session and its body share."""


@dataclass
class Restores:
    """Creates, updates and ends restore sessions. Any thread may call any method."""

    _store: Store
    _catalog: Catalog
    _index: RestoreIndex
    _leases: RestoreLeases
    _clock: Clock
    _on_end: Callable[[str], None]
    """Called with the id of a session that has ended, from any thread, sometimes more than once."""

    def __post_init__(self) -> None:
        self._started_at = self._clock()

    def join(self, request: RestoreRequest, check_owner: Callable[[str], None]) -> Restore | None:
        """Let a rank join the session of its job; None if there is no session yet. Reads the index only.

        check_owner: raises Forbidden if the caller may not join a session that the token of this name began.

        Raises InvalidName, InvalidRequest, Forbidden, or Conflict with the state of the session.
        """
        _check(request)
        found = self._index.find_key(request.run, request.key)
        return self._join(found, request, check_owner) if found is not None else None

    def open(self, request: RestoreRequest, by: str, check_owner: Callable[[str], None]) -> tuple[Restore, bool]:
        """Resolve the checkpoint, take a lease, create a session and join it; False if another caller created it first.

        Session and lease are durable on return. Raises the errors of join, NoCheckpoint, CorruptObject,
        TooManyRequests or Unavailable.
        """
        _check(request)
        if self._index.count_by_state()[RestoreState.RESTORING] >= MAX_LIVE:
            raise TooManyRequests(
                f"{MAX_LIVE} restores are in progress", "Wait, or cancel some: DELETE /v1/restores/{id}"
            )
        restore = self._begin(request, by)
        found = self._index.create(restore)
        if found.id != restore.id:
            self._leases.release(restore)
        return self._join(found, request, check_owner), found.id == restore.id

    def report(self, id: str, rank: int, report: RankReport) -> Restore:
        """Record the progress of a rank; durable on return. A session that has ended is returned unchanged.

        Raises NotFound or InvalidRequest.
        """
        now = self._clock()

        def rule(restore: Restore, before: RankBody | None) -> tuple[Restore, RankBody | None]:
            _check_rank(rank, restore.world_size)
            return advance(restore, before, rank, report, now)

        return self._announce(id, self._index.change(check_ulid(id), rank, rule))

    def cancel(self, id: str) -> Restore:
        """Cancel a session and release its lease; the state of an ended session is unchanged. Raises NotFound."""
        restore = self._announce(id, self._index.end(check_ulid(id), RestoreState.CANCELLED, "", self._clock()))
        self._leases.release(restore)
        return restore

    def find(self, id: str) -> Restore:
        """One session. Raises NotFound."""
        return self._known(id, self._index.find(check_ulid(id)))

    def view(self, id: str, with_ranks: bool) -> RestoreBody:
        """One session, with its ranks if `with_ranks`. Raises NotFound."""
        restore = self.find(id)
        ranks = self._index.ranks(id) if with_ranks else None
        return replace(self._body(restore, ranks), ranks=ranks)

    def newest(self, run: str | None, limit: int) -> list[RestoreBody]:
        """Sessions of one run or all, newest first; live ones with their progress."""
        found = self._index.newest(check_run(run) if run is not None else None, limit)
        return [self._body(restore, self._index.ranks(restore.id) if restore.live else None) for restore in found]

    def watch(self) -> None:
        """End sessions with a silent rank. For one background thread."""
        now = self._clock()
        for restore in self._index.live():
            if self._expires_at(restore) > now:
                continue
            problem = silence(restore, self._index.ranks(restore.id), now, self._started_at)
            if problem:
                self._announce(restore.id, self._index.end(restore.id, RestoreState.EXPIRED, problem, now))

    def forget(self) -> None:
        """Delete sessions that ended long ago."""
        self._index.forget(self._clock() - _KEPT_S, _KEPT_ENDED)

    def _begin(self, request: RestoreRequest, by: str) -> Restore:
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
                by=by,
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
        if not reference.newest and reference.run in catalog.list_runs(self._store):
            return NoCheckpoint(f"{known.id} was deleted just now", "Restore another checkpoint")
        return StoreUnavailable(
            f"{self._store.url} does not list {known.id}", "Check that the volume is mounted, then try again"
        )

    def _candidates(self, request: RestoreRequest) -> Iterable[Checkpoint]:
        """Read from the store, because the index may not contain the newest commit yet."""
        reference, run = _reference(request), Run(self._store, request.run)
        if reference.newest:
            return catalog.newest_first(run)
        try:
            found = find(run, reference)
        except NoCheckpoint:
            return []
        if found.state is State.CORRUPT:
            raise CorruptObject(f"{found.id} cannot be restored: {found.problem}", "Restore another checkpoint")
        return [found]

    def _join(self, restore: Restore, request: RestoreRequest, check_owner: Callable[[str], None]) -> Restore:
        check_owner(restore.by)
        _check_same(restore, request)
        now = self._clock()
        host = _host(request)

        def rule(restore: Restore, before: RankBody | None) -> tuple[Restore, RankBody | None]:
            joined, rank = add_rank(restore, before, request.rank, now)
            return (replace(joined, host=host) if host and not request.rank and joined.live else joined), rank

        joined = self._known(restore.id, self._index.change(restore.id, request.rank, rule))
        if not joined.live:
            problem = f": {joined.problem}" if joined.problem else ""
            raise Conflict(
                f"restore {joined.id} (key {joined.key!r}) of run {joined.run!r} is {joined.state}{problem}",
                "Join with a new key: a key names one restore of a job",
            )
        return joined

    def _body(self, restore: Restore, ranks: Sequence[RankBody] | None = None) -> RestoreBody:
        """The body of a session. ranks: for its progress; None: it is left out."""
        values: dict[str, Any] = {name: getattr(restore, name) for name in _SAME}
        if ranks is not None:
            values |= {
                "progress": mean(restore, ranks),
                "stragglers": stragglers(restore, ranks, self._clock()),
                "slowest": slowest(ranks) if restore.live else None,
            }
        return RestoreBody(
            **values,
            checkpoint=CheckpointBody.of(restore.checkpoint),
            expires_at=self._expires_at(restore) if restore.live else None,
            done_bytes=int(restore.done_bytes),
            total_bytes=int(restore.total_bytes),
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


MAX_STRAGGLERS = 100
_MAX_PROBLEM = 1000
_NAMED = 16


def add_rank(restore: Restore, before: RankBody | None, rank: int, now: float) -> tuple[Restore, RankBody | None]:
    """Add a rank to a session. A rank that joins again keeps its earlier report."""
    if not restore.live:
        return restore, before
    if before is not None:
        return restore, replace(before, updated_at=now)
    return replace(restore, num_joined=restore.num_joined + 1), RankBody(rank, Phase.JOINED, 0, 0, now)


def advance(
    restore: Restore, before: RankBody | None, rank: int, report: RankReport, now: float
) -> tuple[Restore, RankBody | None]:
    """Apply the report of a rank; the last restored rank and the first failed rank end the session.

    An ended session does not change. A restored rank can fail but not go back: reports may arrive out of order.
    """
    if not restore.live:
        return restore, before
    restore, joined = add_rank(restore, before, rank, now)
    assert joined is not None
    if joined.phase is Phase.RESTORED and report.phase is not Phase.FAILED:
        return restore, joined
    problem = report.problem.replace("\0", "?")[:_MAX_PROBLEM]
    latest = RankBody(rank, report.phase, report.done_bytes, report.total_bytes, now, problem)
    restore = replace(
        restore,
        num_restored=restore.num_restored + (latest.phase is Phase.RESTORED) - (joined.phase is Phase.RESTORED),
        done_bytes=restore.done_bytes + latest.done_bytes - joined.done_bytes,
        total_bytes=restore.total_bytes + latest.total_bytes - joined.total_bytes,
    )
    if latest.phase is Phase.FAILED:
        why = problem or "it gave no reason"
        restore = replace(restore, state=RestoreState.FAILED, ended_at=now, problem=f"rank {rank} failed: {why}")
    elif restore.num_restored == restore.world_size:
        restore = replace(restore, state=RestoreState.RESTORED, ended_at=now)
    return restore, latest


def mean(restore: Restore, ranks: Iterable[RankBody]) -> float:
    """The fraction of a session that is done, from 0 to 1."""
    return sum(progress.fraction for progress in ranks) / restore.world_size


def slowest(ranks: Iterable[RankBody]) -> RankBody | None:
    """The rank with the least progress among those that joined and are not restored."""
    waiting = (progress for progress in ranks if progress.phase is not Phase.RESTORED)
    return min(waiting, key=lambda progress: (progress.fraction, progress.rank), default=None)


def stragglers(restore: Restore, ranks: Sequence[RankBody], now: float) -> list[int]:
    """Ranks that are not restored and are behind: less than half of the median rank's progress, or silent for more
    than a quarter of ttl_s. Sorted, MAX_STRAGGLERS at most.

    Ranks that never joined have no progress and have been silent since the session began.
    """
    if not restore.live:
        return []
    half = _median(restore.world_size, [progress.fraction for progress in ranks]) / 2
    late = now - restore.ttl_s / 4
    behind = [
        progress.rank
        for progress in ranks
        if progress.phase is not Phase.RESTORED and (progress.fraction < half or progress.updated_at < late)
    ]
    if half > 0 or restore.created_at < late:
        behind += _absent(restore.world_size, ranks)
    return sorted(behind)[:MAX_STRAGGLERS]


def silence(restore: Restore, ranks: Sequence[RankBody], now: float, since: float) -> str:
    """Why the session expires: the ranks that were silent for all of ttl_s, with their phases. Empty if none was.

    since: silence before this time does not count, because no daemon was running to receive reports.
    """
    last_call = now - restore.ttl_s
    if since > last_call:
        return ""
    silent = [
        f"rank {progress.rank} ({progress.phase})"
        for progress in ranks
        if progress.phase is not Phase.RESTORED and progress.updated_at <= last_call
    ]
    num_silent = len(silent)
    if restore.created_at <= last_call:
        silent += [f"rank {rank} (never joined)" for rank in _absent(restore.world_size, ranks)]
        num_silent += restore.world_size - len(ranks)
    if not silent:
        return ""
    more = f" and {num_silent - _NAMED} more" if num_silent > _NAMED else ""
    return f"no report for {restore.ttl_s:g} s from {', '.join(silent[:_NAMED])}{more}"


def _median(world_size: int, fractions: Sequence[float]) -> float:
    num_absent = world_size - len(fractions)
    ordered = sorted(fractions)
    middle = [i - num_absent for i in ((world_size - 1) // 2, world_size // 2)]
    return sum(ordered[i] for i in middle if i >= 0) / 2


def _absent(world_size: int, ranks: Sequence[RankBody]) -> list[int]:
    """The first ranks that never joined, MAX_STRAGGLERS at most."""
    present = {progress.rank for progress in ranks}
    return list(islice((rank for rank in range(world_size) if rank not in present), MAX_STRAGGLERS))


_LOG = logging.getLogger(__name__)
_OUTLIVES_S = 600.0
"""How long a lease outlasts the ttl_s of its session, so that a daemon has time to restart."""


@dataclass
class RestoreLeases:
    """Reports only change the index; all work that waits for the store is here."""

    _store: Store
    _index: RestoreIndex
    _metrics: Metrics
    _clock: Clock
    _on_end: Callable[[str], None]
    """Called with the id of a session that fails because its lease is lost."""

    def take(self, checkpoint: Checkpoint, id: str, ttl_s: float) -> tuple[str, float]:
        """Protect the checkpoint of a new session. Returns the lease and its expiry time.

        Durable on return. Raises NoCheckpoint if the checkpoint is being deleted, or Unavailable.
        """
        duration = ttl_s + _OUTLIVES_S
        until = self._clock() + duration
        return take_lease(
            self._run(checkpoint.run), checkpoint.attempt, _holder(id), duration, checkpoint.thinned
        ), until

    def release(self, restore: Restore) -> None:
        """Release the lease of a session. Idempotent. Raises Unavailable."""
        if restore.lease is not None:
            release_lease(self._run(restore.run), restore.lease)
            self._index.release(restore.id)

    def run_once(self) -> None:
        """Release the leases of ended sessions and renew those of live ones. Never raises CkptError."""
        for restore in self._index.leased():
            try:
                if restore.live:
                    self._renew(restore)
                else:
                    self.release(restore)
            except CkptError as error:
                _LOG.warning("cannot renew or release the lease of restore %s: %s", restore.id, error)
                self._metrics.count_store_error("restore", error)

    def _run(self, name: str) -> Run:
        return Run(self._store, name, self._clock)

    def _renew(self, restore: Restore) -> None:
        now = self._clock()
        duration = restore.ttl_s + _OUTLIVES_S
        if restore.lease is None or restore.lease_until - now > duration / 2:
            return
        checkpoint, lease = restore.checkpoint, restore.lease
        if now < restore.lease_until:
            renew_lease(self._run(restore.run), lease, checkpoint.attempt, _holder(restore.id), duration)
        else:
            try:
                lease, _ = self.take(checkpoint, restore.id, restore.ttl_s)
            except NoCheckpoint as error:
                problem = f"{error.message}: its lease expired while no daemon was running to renew it"
                self._index.end(restore.id, RestoreState.FAILED, problem, now)
                self._on_end(restore.id)
                return
        if not self._index.renew(restore.id, lease, now + duration):
            # The session has just ended, and its lease may have been released before we renewed it.
            release_lease(self._run(restore.run), lease)


def _holder(id: str) -> str:
    return f"restore {id}"
