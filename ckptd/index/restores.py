"""Restore sessions and their ranks. Every method is one transaction and may be called from any thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msgspec.structs import asdict
from sqlalchemy import Connection, func, insert, select, update

from ckptapi.bodies import Phase, RankBody, RestoreState
from ckptd.index.database import Database, retried
from ckptd.index.tables import restore_ranks, restores
from ckptstore.commits.catalog import Checkpoint
from ckptstore.values import Record

_NEWEST_FIRST = (restores.c.created_at.desc(), restores.c.id.desc())
_RANK = [restore_ranks.c[name] for name in RankBody.__struct_fields__]


class Restore(Record):
    """One restore session: all ranks of a job restore one checkpoint."""

    id: str
    run: str
    key: str
    """The job's name for this restore; unique within the run."""
    checkpoint: Checkpoint
    by: str
    """The name of the token that began it."""
    world_size: int
    ttl_s: float
    created_at: float
    lease: str | None
    """None once it is released."""
    lease_until: float
    state: RestoreState = RestoreState.RESTORING
    ended_at: float | None = None
    problem: str = ""
    num_joined: int = 0
    num_restored: int = 0
    done_bytes: float = 0.0
    total_bytes: float = 0.0
    host: str = ""
    """The host of rank 0, or of the rank that joined first until rank 0 does."""

    @property
    def live(self) -> bool:
        """Not ended."""
        return self.state.live


RestoreChange = Callable[[Restore, RankBody | None], tuple[Restore, RankBody | None]]
"""Maps a session and a rank's last report to their new values. Pure."""


@dataclass
class RestoreIndex:
    """The restore sessions of one daemon, or of those that share its database."""

    _database: Database

    # Queries

    def find(self, id: str) -> Restore | None:
        """One session."""
        return next(iter(self._all(restores.c.id == id)), None)

    def find_key(self, run: str, key: str) -> Restore | None:
        """The session that a job calls `key`."""
        return next(iter(self._all(restores.c.run == run, restores.c.key == key)), None)

    def newest(self, run: str | None, limit: int) -> list[Restore]:
        """Sessions of one run or all, newest first."""
        return self._all(*([restores.c.run == run] if run is not None else []), limit=limit)

    def live(self) -> list[Restore]:
        """Sessions that have not ended."""
        return self._all(restores.c.state == RestoreState.RESTORING)

    def leased(self) -> list[Restore]:
        """Sessions that hold a lease."""
        return self._all(restores.c.lease.is_not(None))

    def ranks(self, id: str) -> list[RankBody]:
        """The ranks that joined, in order."""
        query = select(*_RANK).where(restore_ranks.c.restore_id == id).order_by(restore_ranks.c.rank)
        return [RankBody(*row) for row in self._database.rows(query)]

    def oldest_report(self, id: str) -> float | None:
        """Time of the oldest last report among the ranks that joined and are not restored."""
        reported = restore_ranks.c.updated_at
        query = select(func.min(reported)).where(restore_ranks.c.restore_id == id)
        found: float | None = self._database.scalar(query.where(restore_ranks.c.phase != Phase.RESTORED))
        return found

    def count_by_state(self) -> dict[RestoreState, int]:
        """The number of sessions by state, including ended ones that are still stored."""
        query = select(restores.c.state, func.count()).group_by(restores.c.state)
        found = {RestoreState(state): count for state, count in self._database.rows(query)}
        return {state: found.get(state, 0) for state in RestoreState}

    # Changes

    @retried
    def create(self, restore: Restore) -> Restore:
        """Insert a session; returns the existing one if another caller was faster."""
        with self._database.write() as connection:
            found = _one(connection, restores.c.run == restore.run, restores.c.key == restore.key, lock=True)
            if found is None:
                connection.execute(insert(restores).values(asdict(restore)))
            return found or restore

    @retried
    def change(self, id: str, rank: int, rule: RestoreChange) -> Restore | None:
        """Apply a change to a session and one of its ranks; None if there is no such session."""
        same_rank = (restore_ranks.c.restore_id == id, restore_ranks.c.rank == rank)
        with self._database.write() as connection:
            before = _one(connection, restores.c.id == id, lock=True)
            if before is None:
                return None
            row = connection.execute(select(*_RANK).where(*same_rank)).one_or_none()
            rank_before = RankBody(*row) if row is not None else None
            after, rank_after = rule(before, rank_before)
            if rank_after is not None and rank_before is None:
                connection.execute(insert(restore_ranks).values(restore_id=id, **asdict(rank_after)))
            elif rank_after is not None and rank_after != rank_before:
                connection.execute(update(restore_ranks).where(*same_rank).values(asdict(rank_after)))
            if after != before:
                connection.execute(update(restores).where(restores.c.id == id).values(asdict(after)))
            return after

    @retried
    def end(self, id: str, state: RestoreState, problem: str, now: float) -> Restore | None:
        """End a session unless it has ended. Returns its new value, or None if there is no such session."""
        ended = {"state": state, "problem": problem, "ended_at": now}
        with self._database.write() as connection:
            live = (restores.c.id == id, restores.c.state == RestoreState.RESTORING)
            connection.execute(update(restores).where(*live).values(ended))
            return _one(connection, restores.c.id == id)

    def renew(self, id: str, lease: str, until: float) -> bool:
        """Record the lease of a session; False if the session has ended."""
        live = (restores.c.id == id, restores.c.state == RestoreState.RESTORING)
        return self._database.change(update(restores).where(*live).values(lease=lease, lease_until=until)) == 1

    def release(self, id: str) -> None:
        """Record that a session holds no lease any more."""
        self._database.change(update(restores).where(restores.c.id == id).values(lease=None))

    def forget(self, before: float, keep: int) -> None:
        """Delete sessions that ended before `before`, and all but the `keep` that ended last."""
        self._database.forget_ended(restores, before, keep)

    def _all(self, *conditions: Any, limit: int | None = None) -> list[Restore]:
        """Newest first."""
        query = select(restores).where(*conditions).order_by(*_NEWEST_FIRST).limit(limit)
        return [Restore(**row._mapping) for row in self._database.rows(query)]


def _one(connection: Connection, *conditions: Any, lock: bool = False) -> Restore | None:
    query = select(restores).where(*conditions)
    row = connection.execute(query.with_for_update() if lock else query).one_or_none()
    return Restore(**row._mapping) if row is not None else None
