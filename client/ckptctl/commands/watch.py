"""watch: follows the events of checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Annotated

from ckptapi import bodies
from ckptapi.bodies import EventBody, EventKind
from ckptctl.commands.arguments import an_argument, an_option
from ckptctl.session import Session
from ckptstore import human
from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.errors import Unavailable
from ckptstore.names import check_run
from ckptstore.reading.source import Source

if TYPE_CHECKING:
    from ckptapi.client import DaemonClient

_PAUSE_S = 1.0
_LOOK_S = 2.0


def watch(
    session: Session,
    run: Annotated[str | None, an_argument("Limit to one run.", "RUN")] = None,
    count: Annotated[int, an_option("Exit after N events; 0: never.", "N", "--count", "-n", min=0)] = 0,
) -> None:
    """Follow commits, deletions and damage until interrupted.

    With a daemon, events arrive within moments and include prunes, restores and jobs; no event is missed if the
    connection is lost. A store is polled every two seconds.
    """
    run = check_run(run) if run is not None else None
    if session.target.is_daemon:
        events = _from_daemon(session.daemon("watch"), run, session.screen.note)
    else:
        events = _from_store(session.source, run, session.clock)
    for event in islice(events, count or None):
        session.screen.emit(event, [event.checkpoint] if event.checkpoint else [], [_line(event)])


def _from_daemon(daemon: DaemonClient, run: str | None, note: Callable[[str], None]) -> Iterator[EventBody]:
    """Read the event stream, or poll pages while it is not available. Only the first request raises errors."""
    after: int | None = None
    while True:
        try:
            for event in daemon.event_stream(after, run):
                after = event.id
                if event.kind == bodies.GAP:
                    note("some events were deleted before they could be shown; ckptctl ls lists the checkpoints")
                elif event.kind != bodies.OPEN:
                    yield event
        except Unavailable as error:
            if after is None:
                raise
            note(f"no event stream, polling: {error.message}")
        time.sleep(_PAUSE_S)
        try:
            page = daemon.events(after or 0, run)
        except Unavailable:
            continue
        yield from page.items
        after = page.last_id


def _from_store(source: Source, run: str | None, clock: Callable[[], float]) -> Iterator[EventBody]:
    known = _look(source, run)
    while True:
        time.sleep(_LOOK_S)
        found = _look(source, run)
        for id, checkpoint in found.items():
            before = known.get(id)
            if checkpoint.state is State.CORRUPT:
                if before is None or before.state is not State.CORRUPT:
                    yield _event(EventKind.CORRUPT, checkpoint, clock(), problem=checkpoint.problem)
            elif before is None:
                names = ("committed_at", "save_seconds", "stored_bytes", "metrics")
                facts = {name: getattr(checkpoint, name) for name in names}
                yield _event(EventKind.COMMITTED, checkpoint, clock(), **facts)
        for id in known.keys() - found.keys():
            yield _event(EventKind.DELETED, known[id], clock())
        known = found


def _look(source: Source, run: str | None) -> dict[str, Checkpoint]:
    runs = source.runs() if run is None else [run]
    found = [checkpoint for name in runs for checkpoint in source.checkpoints(name)]
    return {checkpoint.id: checkpoint for checkpoint in sorted(found, key=lambda checkpoint: checkpoint.committed_at)}


def _event(kind: EventKind, checkpoint: Checkpoint, at: float, **detail: object) -> EventBody:
    return EventBody(
        id=int(at * 1000),
        at=at,
        time=human.rfc3339(at),
        kind=kind,
        run=checkpoint.run,
        checkpoint=checkpoint.id,
        detail={"step": checkpoint.step, **detail},
    )


def _line(event: EventBody) -> str:
    detail = event.detail
    parts = [human.moment(event.at), event.kind, event.checkpoint or event.run or ""]
    if event.kind == EventKind.COMMITTED:
        parts.append(human.size(detail.get("stored_bytes", 0)))
        parts.append(f"saved in {human.duration(float(detail.get('save_seconds', 0)))}")
        parts.append(human.metrics(detail.get("metrics", {})))
    elif event.kind == EventKind.PRUNED:
        freed = human.size(detail.get("freed_bytes", 0))
        parts.append(f"{human.count(int(detail.get('removed', 0)), 'checkpoint')}, {freed}")
    else:
        parts += [str(detail[name]) for name in ("state", "kind", "problem") if detail.get(name)]
    return "  ".join(part for part in parts if part)
