"""Events: what happened to checkpoints, restores and jobs, in order."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

EVENTS = "/v1/events"
EVENT_STREAM = "text/event-stream"
MAX_EVENTS = 500
OPEN = "open"
"""The first message of a stream: its id is where the stream begins."""
GAP = "gap"
"""A message of a stream: events between the id asked for and the next one are not kept any more."""


class EventKind(StrEnum):
    """What happened. New kinds may be added."""

    COMMITTED = "committed"
    """A checkpoint exists from now on; after an undeletion, again."""
    CORRUPT = "corrupt"
    """A checkpoint was found damaged."""
    DELETED = "deleted"
    """A checkpoint, or a whole run, is not listed any more."""
    PRUNED = "pruned"
    """A prune ended; a `deleted` stands for each checkpoint besides."""
    RESTORE_ENDED = "restore_ended"
    JOB_ENDED = "job_ended"


class EventBody(msgspec.Struct, frozen=True, kw_only=True):
    """One event as JSON."""

    id: int
    """Rises from event to event, also over a restart; not by one."""
    at: float
    kind: str
    run: str | None = None
    checkpoint: str | None = None
    detail: dict[str, Any] = {}
    """By kind: docs/api.md."""


class EventsBody(msgspec.Struct, frozen=True, kw_only=True):
    """Events after an id, oldest first."""

    items: list[EventBody]
    last_id: int
    """Ask for what comes after this one next."""
    gap: bool = False
    """Events after the id that was asked for are not kept any more: list the checkpoints anew."""
