"""Reading and changing the index. Every method is one transaction and may be called from any thread."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

from sqlalchemy import (
    BigInteger,
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
    tuple_,
    update,
)

from ckptapi.bodies import EventBody
from ckptd.index.database import Database, retried
from ckptd.index.events import EventLog, content_of
from ckptd.index.tables import (
    NEWEST_FIRST,
    aborted,
    checkpoints,
    decisions,
    generations,
    origin,
    restores,
    revision,
    runs,
)
from ckptstore.commits.catalog import Checkpoint, State, named, with_parents, with_states
from ckptstore.commits.generations import Lineage
from ckptstore.errors import InvalidRequest, NoCheckpoint
from ckptstore.names import Attempt, Reference

_STAMPED = ("generation", "step", "ulid", "object_bytes", "object_modified_at")
_KNOWN = tuple(checkpoints.c[name] for name in (*_STAMPED, "labels_version", "state", "thinned"))
_SAME = {field.name for field in fields(Checkpoint)}.intersection(checkpoints.c.keys()) - {"parent"}
"""Columns that are fields of a checkpoint."""


class RunChanged(Exception):
    """Another process changed the run after it was read."""


class Stamp(NamedTuple):
    """Size and time of an outcome in a listing, and the version of its labels. A changed stamp indicates damage."""

    bytes: int
    modified_at: float
    labels_version: int = 0


class IndexedAttempts(NamedTuple):
    """The indexed attempts of a run."""

    version: int
    """0 if the run is not indexed."""
    checkpoints: Mapping[Attempt, Stamp | None]
    corrupt: frozenset[Attempt]
    """The checkpoints whose outcome could not be read."""
    thinned: frozenset[Attempt]
    aborted: Mapping[Attempt, Stamp | None]
    generations: Mapping[int, Stamp | None]


class Reading(NamedTuple):
    """The result of reading a run from the store."""

    found: Sequence[Checkpoint] = ()
    aborted: Sequence[Attempt] = ()
    """Attempts whose outcome is aborted."""
    gone: Sequence[Attempt] = ()
    """Attempts whose outcome was deleted or hidden."""
    generations: Sequence[BegunGeneration] = ()
    lost_generations: Sequence[int] = ()
    """Generations whose document was deleted."""
    stamps: Mapping[Attempt, Stamp] = {}
    """Stamps of the outcomes that were listed before they were read."""

    @property
    def touched(self) -> list[Attempt]:
        """All attempts whose outcome was read or is gone."""
        return [*self.gone, *self.aborted, *(checkpoint.attempt for checkpoint in self.found)]


class RunSummary(NamedTuple):
    """One run: how many checkpoints of all states, their bytes, the newest usable one."""

    run: str
    num_checkpoints: int
    stored_bytes: int
    latest: Checkpoint | None


@dataclass
class Index:
    """The cached catalog of one store."""

    _database: Database
    _log: EventLog | None = None
    """Records the changes as events."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self.seen = (0, 0)
        """How often the revision that this object has seen went back, and that revision: after its own changes, or at
        the last `look`. It goes back when another server takes over that lacks the last changes."""

    # Queries

    def look(self) -> int:
        """The current revision: a number that grows with every change of the tables that the queries below read."""
        return self._see(self._database.scalar(select(revision.c.value)))

    def versions(self) -> dict[str, int]:
        """All runs by name, each with the revision of its last change."""
        rows = self._database.rows(select(runs.c.name, runs.c.version).order_by(runs.c.name))
        return {row.name: row.version for row in rows}

    def version(self, run: str) -> int:
        """The revision of the last change of a run, 0 if it is not indexed."""
        return self._database.scalar(_version(run)) or 0

    @retried
    def attempts(self, run: str) -> IndexedAttempts:
        """The attempts of a run whose outcome is indexed."""
        with self._database.read() as connection:
            version = connection.scalar(_version(run)) or 0
            known = connection.execute(select(*_KNOWN).where(checkpoints.c.run == run)).all()
            columns = (aborted.c[name] for name in _STAMPED)
            return IndexedAttempts(
                version=version,
                checkpoints=_stamps(known),
                corrupt=frozenset(attempt_of(row) for row in known if row.state == State.CORRUPT),
                thinned=frozenset(attempt_of(row) for row in known if row.thinned),
                aborted=_stamps(connection.execute(select(*columns).where(aborted.c.run == run))),
                generations=generation_stamps(connection, run),
            )

    def find(self, reference: Reference) -> Checkpoint | None:
        """The checkpoint that a reference names; without a ULID, one that a restore may use.

        A step without a ULID names an abandoned checkpoint only if the live lineage has none of it.
        """
        c = checkpoints.c
        query = select(checkpoints).where(c.run == reference.run)
        if reference.name is not None:
            with suppress(NoCheckpoint):
                return named(self._select(query), reference, "")
            return None
        if reference.newest:
            query = query.where(c.state == State.COMMITTED)
        elif reference.ulid is None:
            query = query.where(c.step == reference.step, c.state.not_in([State.CORRUPT, State.SUPERSEDED]))
            query = query.order_by((c.state == State.ABANDONED).asc())
        else:
            query = query.where(c.step == reference.step, c.ulid == reference.ulid)
        return next(iter(self._select(query.order_by(*NEWEST_FIRST).limit(1))), None)

    def latest_of_runs(self, limit: int) -> list[Checkpoint]:
        """The newest checkpoint of each run that has one, by name; of the first `limit` runs."""
        return self._select(_newest(limit))

    @retried
    def summaries(self) -> list[RunSummary]:
        """All runs, in order."""
        with self._database.read() as connection:
            newest = {row.run: read_checkpoint(row) for row in connection.execute(_newest())}
            rows = connection.execute(select(runs).order_by(runs.c.name)).all()
        return [RunSummary(row.name, row.num_checkpoints, int(row.stored_bytes), newest.get(row.name)) for row in rows]

    def stored_over_time(self, now: float) -> list[tuple[str, float, float]]:
        """Run, time and stored bytes of the checkpoints that were committed in the same ten minutes, oldest first.

        Checkpoints without a time before `now` are left out.
        """
        c = checkpoints.c
        at = (c.committed_at.cast(BigInteger) // 600 * 600).label("at")
        rows = select(c.run, at, func.sum(c.stored_bytes.cast(Double))).where(c.committed_at.between(1, now))
        return [tuple(row) for row in self._database.rows(rows.group_by(c.run, "at").order_by("at"))]

    # Changes

    @retried
    def adopt(self, url: str, now: float) -> None:
        """Make this the index of the store at `url`; the rows of another store are deleted.

        Raises InvalidRequest if daemons of another store may be using the database.
        """
        with self._database.write() as connection:
            _next_revision(connection)
            known: str | None = connection.scalar(select(origin.c.url))
            if known == url:
                return
            if known is not None and self._database.shared:
                raise InvalidRequest(
                    f"{self._database.url} is the index of {known}, not of {url}",
                    "Use one database per store, and the same URL of the store for all of its daemons",
                )
            for table in (runs, restores, decisions, origin):
                connection.execute(delete(table))
            connection.execute(insert(origin).values(url=url, adopted_at=now))

    @retried
    def apply(self, run: str, reading: Reading, expected: int | None = None) -> int:
        """Write the result of reading a run, and recompute the states of its checkpoints. Returns its new version.

        expected: its version before the reading began, 0 if it was not indexed. Raises RunChanged if the version
        differs: then another process has written a newer reading.
        """
        with self._database.write() as connection:
            version = _next_revision(connection)
            before: int | None = connection.scalar(_version(run))
            if expected is not None and expected != (before or 0):
                raise RunChanged(f"run {run!r} was changed by another process")
            if before is None:
                connection.execute(insert(runs).values(name=run, version=version, num_checkpoints=0, stored_bytes=0.0))
            recorded = self._record(connection, run, reading)
            heads = read_heads(connection, run)
            _write(connection, run, reading)
            steps = {attempt.step for attempt in reading.touched}
            # Then the states of checkpoints that are not in the reading may change, too.
            lineage = reading.generations or reading.lost_generations or heads != read_heads(connection, run)
            settle_states(connection, run, None if lineage else steps)
            _summarize(connection, run, version)
        if self._log is not None:
            self._log.announce(recorded)
        return self._see(version)

    @retried
    def drop_runs(self, versions: Mapping[str, int]) -> None:
        """Delete runs and their checkpoints from the index, unless their version has changed."""
        with self._database.write() as connection:
            revision = _next_revision(connection)
            for name, version in versions.items():
                connection.execute(delete(runs).where(runs.c.name == name, runs.c.version == version))
        self._see(revision)

    def _see(self, revision: int) -> int:
        with self._lock:
            times, before = self.seen
            self.seen = (times + (revision < before), revision)
        return revision

    def _record(self, connection: Connection, run: str, reading: Reading) -> list[EventBody]:
        if self._log is None:
            return []
        known = _states(connection, run, reading.touched)
        since = self._log.since(connection)
        wrong = select(checkpoints.c.step).where(checkpoints.c.run == run, checkpoints.c.not_finite > 0).limit(1)
        was_finite = connection.scalar(wrong) is None
        found = content_of(run, known, reading.found, reading.gone, since, was_finite)
        return self._log.record(connection, list(found))

    def _select(self, query: Select[Any]) -> list[Checkpoint]:
        return [read_checkpoint(row) for row in self._database.rows(query)]


def _version(run: str) -> Select[Any]:
    """The revision of the last change of a run."""
    return select(runs.c.version).where(runs.c.name == run)


def _newest(limit: int | None = None) -> Select[Any]:
    """The newest checkpoint of each run that has one, by name; of the first `limit` runs."""
    c, of = checkpoints.c, runs.c
    # Not a join: SQLite would scan all checkpoints, and look for the run of each.
    some = select(of.name, of.latest_step, of.latest_ulid).where(of.latest_committed_at.is_not(None))
    first = some.order_by(of.name).limit(limit)
    return select(checkpoints).where(tuple_(c.run, c.step, c.ulid).in_(first)).order_by(c.run)


def _next_revision(connection: Connection) -> int:
    # Every writer of runs locks this row, so that writers are serialized as on SQLite.
    changed = update(revision).values(value=revision.c.value + 1).returning(revision.c.value)
    found: int = connection.execute(changed).scalar_one()
    return found


def _states(connection: Connection, run: str, attempts: Collection[Attempt]) -> dict[Attempt, State]:
    """States of those attempts that are indexed checkpoints, and of some others."""
    c = checkpoints.c
    steps = [attempt.step for attempt in attempts]
    if not steps:
        return {}
    columns = [c.generation, c.step, c.ulid, c.state]
    query = select(*columns).where(c.run == run, c.step.between(min(steps), max(steps)))
    return {attempt_of(row): row.state for row in connection.execute(query)}


def _write(connection: Connection, run: str, reading: Reading) -> None:
    for table in (checkpoints, aborted):
        _delete(connection, table, run, reading.touched)
    if reading.found:
        rows = [_row(checkpoint, reading.stamps.get(checkpoint.attempt)) for checkpoint in reading.found]
        connection.execute(insert(checkpoints), rows)
    if reading.aborted:
        rows = [{"run": run, **asdict(a), **_stamp_columns(reading.stamps.get(a))} for a in reading.aborted]
        connection.execute(insert(aborted), rows)
    for number in (*reading.lost_generations, *(one.number for one in reading.generations)):
        connection.execute(delete(generations).where(generations.c.run == run, generations.c.number == number))
    if reading.generations:
        rows = [
            {"run": run, "number": number, "parent": parent, "readable": readable, **_stamp_columns(stamp)}
            for number, parent, readable, stamp in reading.generations
        ]
        connection.execute(insert(generations), rows)


def _summarize(connection: Connection, run: str, version: int) -> None:
    c = checkpoints.c
    # A floating-point sum cannot overflow, whatever sizes an outcome claims.
    totals = select(func.count(), func.coalesce(func.sum(c.stored_bytes.cast(Double)), 0.0)).where(c.run == run)
    number, stored = connection.execute(totals).one()
    usable = select(c.step, c.ulid, c.committed_at).where(c.run == run, c.state == State.COMMITTED)
    step, ulid, at = connection.execute(usable.order_by(*NEWEST_FIRST).limit(1)).one_or_none() or (None, None, None)
    summary = {
        "version": version,
        "num_checkpoints": number,
        "stored_bytes": stored,
        "latest_step": step,
        "latest_ulid": ulid,
        "latest_committed_at": at,
    }
    connection.execute(update(runs).where(runs.c.name == run).values(summary))


def _delete(connection: Connection, table: Table, run: str, attempts: Iterable[Attempt]) -> None:
    rows = [{"_step": attempt.step, "_ulid": attempt.ulid} for attempt in attempts]
    if rows:
        same = (table.c.run == run, table.c.step == bindparam("_step"), table.c.ulid == bindparam("_ulid"))
        connection.execute(delete(table).where(*same), rows)


def _stamps(rows: Iterable[Any]) -> dict[Attempt, Stamp | None]:
    return {
        Attempt(step, ulid, generation=generation): (
            Stamp(size, modified_at, *labels_and_state[:1]) if size is not None else None
        )
        for generation, step, ulid, size, modified_at, *labels_and_state in rows
    }


def _stamp_columns(stamp: Stamp | None) -> dict[str, Any]:
    size, modified_at, _ = stamp or (None, None, 0)
    return {"object_bytes": size, "object_modified_at": modified_at}


def _row(checkpoint: Checkpoint, stamp: Stamp | None) -> dict[str, Any]:
    labels_version = stamp.labels_version if stamp else 0
    # Text from a damaged outcome; PostgreSQL stores neither NUL nor unpaired surrogates.
    problem = checkpoint.problem.replace("\0", "?").encode(errors="replace").decode()
    own = {"problem": problem, "labels_version": labels_version}
    same = {name: getattr(checkpoint, name) for name in _SAME}
    return {**same, **asdict(checkpoint.attempt), **_stamp_columns(stamp), **own}


Heads = list[tuple[int, bool]]
"""Generations with a checkpoint, newest first, up to the first of which one is readable; and whether one is."""


class BegunGeneration(NamedTuple):
    """The document of a generation, as far as the index knows it."""

    number: int
    parent: str | None
    """The attempt from which it continues; None: none."""
    readable: bool
    """False: the document is damaged, and the parent unknown."""
    stamp: Stamp | None
    """Size and time in the listing before it was read; None if it was not listed."""


def generation_stamps(connection: Connection, run: str) -> dict[int, Stamp | None]:
    """The indexed generations of a run, with size and time of their documents in the listing."""
    c = generations.c
    rows = connection.execute(select(c.number, c.object_bytes, c.object_modified_at).where(c.run == run))
    return {number: Stamp(size, modified_at) if size is not None else None for number, size, modified_at in rows}


def read_heads(connection: Connection, run: str) -> Heads:
    """The generations that decide what is live."""
    c = checkpoints.c
    readable = or_(c.state != State.CORRUPT, c.manifest_digest != "")
    certain = connection.scalar(select(func.max(c.generation)).where(c.run == run, readable))
    query = select(c.generation).distinct().where(c.run == run, c.generation >= (certain or 0))
    found = connection.scalars(query.order_by(c.generation.desc()))
    return [(generation, generation == certain) for generation in found]


def settle_states(connection: Connection, run: str, steps: Collection[int] | None) -> None:
    """Recompute which checkpoints are superseded or abandoned. steps: only of these; None: of the whole run."""
    if steps is not None and not steps:
        return
    c = checkpoints.c
    query = select(checkpoints).where(c.run == run)
    if steps is not None:
        query = query.where(c.step.between(min(steps), max(steps)))
    before = {found.attempt: found for found in map(read_checkpoint, connection.execute(query.order_by(*NEWEST_FIRST)))}
    g = generations.c
    rows = connection.execute(select(g.number, g.parent).where(g.run == run, g.readable))
    parent_of = {row.number: row for row in rows}.get
    lineage = Lineage(parent_of)
    for generation, readable in read_heads(connection, run):
        lineage.add(generation, readable)
    begun_at = {number: stamp.modified_at for number, stamp in generation_stamps(connection, run).items() if stamp}
    as_read = (
        replace(found, state=State.COMMITTED, abandoned_at=None) if found.state is not State.CORRUPT else found
        for found in before.values()
    )
    for after in with_parents(with_states(as_read, lineage, begun_at), parent_of):
        if (settled := _settled(after)) != _settled(before[after.attempt]):
            same = and_(c.run == run, c.step == after.step, c.ulid == after.attempt.ulid)
            connection.execute(update(checkpoints).where(same).values(settled))


def _settled(checkpoint: Checkpoint) -> dict[str, Any]:
    """The columns that depend on other rows."""
    parent = str(checkpoint.parent) if checkpoint.parent is not None else None
    return {"state": checkpoint.state, "abandoned_at": checkpoint.abandoned_at, "parent": parent}


def attempt_of(row: Row[Any]) -> Attempt:
    """The attempt in a row."""
    return Attempt(row.step, row.ulid, generation=row.generation)


def read_checkpoint(row: Row[Any]) -> Checkpoint:
    """The checkpoint in a row of the table."""
    by_name = row._mapping
    values = {name: by_name[name] for name in _SAME}
    parent = Attempt.parse(row.parent) if row.parent is not None else None
    return Checkpoint(attempt=attempt_of(row), parent=parent, written_at=row.object_modified_at or 0.0, **values)
