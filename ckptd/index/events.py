"""The event log. An event that is recorded in the transaction of an index change is committed with it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import asdict, replace
from sqlalchemy import Connection, delete, func, insert, select

from ckptapi.bodies import EventBody, EventKind
from ckptd.index.database import Database, retried
from ckptd.index.tables import events, origin
from ckptstore.clock import Clock
from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.human import rfc3339
from ckptstore.names import Attempt, checkpoint_id


@dataclass
class EventLog:
    """Events in the order of their ids. Any thread may use it."""

    _database: Database
    clock: Clock
    _listeners: list[Callable[[Sequence[EventBody]], None]] = field(default_factory=list)

    def subscribe(self, listener: Callable[[Sequence[EventBody]], None]) -> None:
        """Call a listener with each batch of events after it is committed; from any thread."""
        self._listeners.append(listener)

    @retried
    def add(self, content: EventBody) -> EventBody:
        """Record one event; durable on return."""
        with self._database.write() as connection:
            recorded = self.record(connection, [content])
        self.announce(recorded)
        return recorded[0]

    def record(self, connection: Connection, contents: Sequence[EventBody]) -> list[EventBody]:
        """Record events within a write transaction. Call `announce` after it is committed."""
        if not contents:
            return []
        # The row is a lock: ids become visible in order, so that readers never skip one.
        connection.execute(select(origin.c.url).with_for_update())
        now = self.clock()
        newest: int = connection.scalar(select(func.coalesce(func.max(events.c.id), 0)))  # type: ignore[assignment]
        # Milliseconds, so that ids keep growing after the database was deleted.
        first = max(newest + 1, int(now * 1000))
        recorded = [replace(item, id=first + place, at=now, time=rfc3339(now)) for place, item in enumerate(contents)]
        connection.execute(insert(events), [asdict(event) for event in recorded])
        return recorded

    def announce(self, recorded: Sequence[EventBody]) -> None:
        """Call the listeners with committed events."""
        if recorded:
            for listener in self._listeners:
                listener(recorded)

    def since(self, connection: Connection) -> float:
        """When this index began to follow its store. Earlier commits are not recorded as events."""
        return connection.scalar(select(origin.c.adopted_at)) or 0.0

    def after(self, id: int, limit: int, run: str | None = None, checkpoint: str | None = None) -> list[EventBody]:
        """Events after an id, oldest first."""
        query = select(events).where(events.c.id > id).order_by(events.c.id).limit(limit)
        if run is not None:
            query = query.where(events.c.run == run)
        if checkpoint is not None:
            query = query.where(events.c.checkpoint == checkpoint)
        return [EventBody(**row._mapping, time=rfc3339(row.at)) for row in self._database.rows(query)]

    def bounds(self) -> tuple[int, int]:
        """The ids of the oldest and the newest stored event; zeros without events."""
        [(oldest, newest)] = self._database.rows(select(func.min(events.c.id), func.max(events.c.id)))
        return oldest or 0, newest or 0

    def trim(self, keep: int) -> None:
        """Delete all events but the `keep` newest."""
        last = select(events.c.id).order_by(events.c.id.desc()).offset(keep).limit(1).scalar_subquery()
        self._database.change(delete(events).where(events.c.id <= last))


_OF_A_COMMIT = (
    "committed_at", "save_seconds", "world_size", "raw_bytes", "stored_bytes", "manifest_digest", "metrics",
)  # fmt: skip


def content_of(
    run: str,
    known: Mapping[Attempt, State],
    found: Collection[Checkpoint],
    gone: Collection[Attempt],
    since: float,
    was_finite: bool,
) -> Iterator[EventBody]:
    """Events for checkpoints that were read or are gone. since: earlier commits give no event.

    was_finite: whether no other checkpoint of the run has NaN or Inf.
    """
    for checkpoint in sorted(found, key=lambda checkpoint: checkpoint.committed_at):
        before = known.get(checkpoint.attempt)
        if checkpoint.state is State.CORRUPT:
            if before is not State.CORRUPT:
                yield _content(EventKind.CORRUPT, run, checkpoint.attempt, problem=checkpoint.problem)
        elif before is None and checkpoint.committed_at >= since:
            detail = {name: getattr(checkpoint, name) for name in _OF_A_COMMIT}
            yield _content(EventKind.COMMITTED, run, checkpoint.attempt, **detail)
            if checkpoint.not_finite and was_finite:
                was_finite = False
                yield _content(EventKind.NOT_FINITE, run, checkpoint.attempt, not_finite=checkpoint.not_finite)
    for attempt in sorted(set(gone) & known.keys()):
        yield _content(EventKind.DELETED, run, attempt)


def _content(kind: EventKind, run: str, attempt: Attempt, **detail: object) -> EventBody:
    return EventBody(
        kind=kind, run=run, checkpoint=checkpoint_id(run, attempt), detail={"step": attempt.step, **detail}
    )
