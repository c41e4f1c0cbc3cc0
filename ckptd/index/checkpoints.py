"""Reading and changing the index. Every method is one transaction and may be called from any thread."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Double,
    Row,
    Select,
    Table,
    and_,
    bindparam,
    delete,
    func,
    insert,
    or_,
    select,
)
from sqlalchemy import update as update_rows

from ckptd.index.database import Database
from ckptd.index.tables import aborted, checkpoints, origin, restores, runs
from ckptstore.catalog import Checkpoint, State, supersede
from ckptstore.names import Attempt, Reference

_ORDER = (checkpoints.c.run, checkpoints.c.step.desc(), checkpoints.c.committed_at.desc(), checkpoints.c.ulid.desc())


@dataclass(frozen=True, slots=True)
class Position:
    """A place in a listing: right after this checkpoint."""

    run: str
    step: int
    committed_at: float
    ulid: str


@dataclass(frozen=True, slots=True)
class IndexedAttempts:
    """What the index knows of a run."""

    checkpoints: frozenset[Attempt]
    corrupt: frozenset[Attempt]
    """Those of the checkpoints whose outcome could not be read."""
    aborted: frozenset[Attempt]


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run: how many checkpoints of all states, their bytes, the newest usable one."""

    run: str
    num_checkpoints: int
    stored_bytes: int
    latest: Checkpoint | None


class Index:
    """The cached catalog of one store."""

    def __init__(self, database: Database) -> None:
        self._database = database

    # Questions

    def ping(self) -> None:
        """Raises IndexUnavailable if the database does not answer."""
        self._database.ping()

    def runs(self) -> list[str]:
        """Names of all runs, in order."""
        with self._database.read() as connection:
            return list(connection.scalars(select(runs.c.name).order_by(runs.c.name)))

    def attempts(self, run: str) -> IndexedAttempts:
        """The attempts of a run whose outcome is indexed."""
        columns = (checkpoints.c.step, checkpoints.c.ulid, checkpoints.c.state)
        with self._database.read() as connection:
            known = connection.execute(select(*columns).where(checkpoints.c.run == run)).all()
            given_up = connection.execute(select(aborted.c.step, aborted.c.ulid).where(aborted.c.run == run)).all()
        return IndexedAttempts(
            checkpoints=frozenset(Attempt(row.step, row.ulid) for row in known),
            corrupt=frozenset(Attempt(row.step, row.ulid) for row in known if row.state == State.CORRUPT),
            aborted=frozenset(Attempt(row.step, row.ulid) for row in given_up),
        )

    def find(self, reference: Reference) -> Checkpoint | None:
        """The checkpoint that a reference names; without a ULID, one that a restore may use."""
        query = select(checkpoints).where(checkpoints.c.run == reference.run)
        if reference.step is not None:
            query = query.where(checkpoints.c.step == reference.step)
        if reference.ulid is not None:
            query = query.where(checkpoints.c.ulid == reference.ulid)
        else:
            query = query.where(checkpoints.c.state == State.COMMITTED)
        return next(iter(self._select(query.order_by(*_ORDER).limit(1))), None)

    def latest(self) -> Checkpoint | None:
        """Of the newest checkpoints of all runs, the one committed last."""
        return max(self._newest(), key=lambda checkpoint: checkpoint.committed_at, default=None)

    def page(self, run: str | None, after: Position | None, limit: int) -> list[Checkpoint]:
        """Checkpoints of one run or all, by run and falling step."""
        query = select(checkpoints).order_by(*_ORDER).limit(limit)
        if run is not None:
            query = query.where(checkpoints.c.run == run)
        if after is not None:
            query = query.where(_is_after(after))
        return self._select(query)

    def summaries(self) -> list[RunSummary]:
        """All runs, in order."""
        newest = {checkpoint.run: checkpoint for checkpoint in self._newest()}
        # As floating point the sum cannot overflow, whatever an outcome claims.
        stored = func.coalesce(func.sum(checkpoints.c.stored_bytes.cast(Double)), 0.0)
        query = (
            select(runs.c.name, func.count(checkpoints.c.ulid), stored)
            .outerjoin(checkpoints, checkpoints.c.run == runs.c.name)
            .group_by(runs.c.name)
            .order_by(runs.c.name)
        )
        with self._database.read() as connection:
            rows = connection.execute(query).all()
        return [RunSummary(name, count, int(total), newest.get(name)) for name, count, total in rows]

    # Changes

    def adopt(self, url: str) -> None:
        """Make this the index of the store at `url`; what was known of another one is forgotten."""
        with self._database.write() as connection:
            if connection.scalar(select(origin.c.url)) == url:
                return
            for table in (runs, restores, origin):
                connection.execute(delete(table))
            connection.execute(insert(origin).values(url=url))

    def apply(
        self, run: str, found: Sequence[Checkpoint] = (), given_up: Sequence[Attempt] = (), gone: Sequence[Attempt] = ()
    ) -> None:
        """Record what was read of a run: checkpoints found, attempts found aborted, attempts whose outcome is gone.

        Decides anew which checkpoints are superseded.
        """
        with self._database.write() as connection:
            if connection.scalar(select(runs.c.name).where(runs.c.name == run)) is None:
                connection.execute(insert(runs).values(name=run))
            touched = [*gone, *given_up, *(checkpoint.attempt for checkpoint in found)]
            for table in (checkpoints, aborted):
                _delete(connection, table, run, touched)
            if found:
                connection.execute(insert(checkpoints), [_row(checkpoint) for checkpoint in found])
            if given_up:
                connection.execute(insert(aborted), [{"run": run, "step": a.step, "ulid": a.ulid} for a in given_up])
            _supersede(connection, run, {attempt.step for attempt in touched})

    def drop_runs(self, names: Collection[str]) -> None:
        """Forget runs and all of their checkpoints."""
        with self._database.write() as connection:
            for name in names:
                connection.execute(delete(runs).where(runs.c.name == name))

    def _select(self, query: Select[Any]) -> list[Checkpoint]:
        with self._database.read() as connection:
            return [_checkpoint(row) for row in connection.execute(query)]

    def _newest(self) -> list[Checkpoint]:
        usable = checkpoints.c.state == State.COMMITTED
        top = (
            select(checkpoints.c.run, func.max(checkpoints.c.step).label("step"))
            .where(usable)
            .group_by(checkpoints.c.run)
            .subquery()
        )
        same = and_(checkpoints.c.run == top.c.run, checkpoints.c.step == top.c.step)
        return self._select(select(checkpoints).join(top, same).where(usable).order_by(checkpoints.c.run))


def _is_after(position: Position) -> ColumnElement[bool]:
    c = checkpoints.c
    return or_(
        c.run > position.run,
        and_(
            c.run == position.run,
            or_(
                c.step < position.step,
                and_(
                    c.step == position.step,
                    or_(
                        c.committed_at < position.committed_at,
                        and_(c.committed_at == position.committed_at, c.ulid < position.ulid),
                    ),
                ),
            ),
        ),
    )


def _delete(connection: Connection, table: Table, run: str, attempts: Iterable[Attempt]) -> None:
    rows = [{"_step": attempt.step, "_ulid": attempt.ulid} for attempt in attempts]
    if rows:
        same = (table.c.run == run, table.c.step == bindparam("_step"), table.c.ulid == bindparam("_ulid"))
        connection.execute(delete(table).where(*same), rows)


def _supersede(connection: Connection, run: str, steps: Collection[int]) -> None:
    if not steps:
        return
    query = select(checkpoints).where(checkpoints.c.run == run, checkpoints.c.step.between(min(steps), max(steps)))
    stored = [_checkpoint(row) for row in connection.execute(query.order_by(*_ORDER))]
    for _, group in groupby(stored, key=lambda checkpoint: checkpoint.step):
        before = {checkpoint.attempt: checkpoint for checkpoint in group}
        for after in supersede(_as_read(checkpoint) for checkpoint in before.values()):
            if after.state is not before[after.attempt].state:
                connection.execute(
                    update_rows(checkpoints)
                    .where(checkpoints.c.run == run, checkpoints.c.step == after.step)
                    .where(checkpoints.c.ulid == after.attempt.ulid)
                    .values(state=after.state)
                )


def _as_read(checkpoint: Checkpoint) -> Checkpoint:
    return replace(checkpoint, state=State.COMMITTED) if checkpoint.state is State.SUPERSEDED else checkpoint


_PLAIN = (
    "run", "state", "committed_at", "created_at", "world_size", "raw_bytes", "stored_bytes", "num_entries",
    "num_shards", "manifest_digest", "manifest_bytes", "problem",
)  # fmt: skip


def _row(checkpoint: Checkpoint) -> dict[str, Any]:
    row = {name: getattr(checkpoint, name) for name in _PLAIN}
    return row | {
        "step": checkpoint.step,
        "ulid": checkpoint.attempt.ulid,
        "metrics": json.dumps(checkpoint.metrics),
    }


def _checkpoint(row: Row[Any]) -> Checkpoint:
    values = {name: row._mapping[name] for name in _PLAIN}
    values |= {
        "attempt": Attempt(row.step, row.ulid),
        "state": State(row.state),
        "metrics": json.loads(row.metrics),
    }
    return Checkpoint(**values)
