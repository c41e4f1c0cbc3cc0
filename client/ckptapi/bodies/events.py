"""Events of checkpoints, restores and jobs, in order."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

EVENTS = "/v1/events"
EVENT_STREAM = "text/event-stream"
MAX_EVENTS = 500
OPEN = "open"
"""The first message of a stream; its id is the start of the stream."""
GAP = "gap"
"""A message of a stream: events between the requested id and the next one were deleted."""


class EventKind(StrEnum):
    """Kinds of events. New kinds may be added."""

    COMMITTED = "committed"
    """A checkpoint exists from now on; after an undeletion, again."""
    NOT_FINITE = "not_finite"
    """The first checkpoint of a run with NaN or Inf was committed."""
    CORRUPT = "corrupt"
    """A checkpoint was found damaged."""
    DELETED = "deleted"
    """A checkpoint, or a whole run, is no longer listed."""
    PRUNED = "pruned"
    """A prune ended. There is also a `deleted` event per checkpoint."""
    PREEMPTED = "preempted"
    """The job of a run will be killed, as POST /v1/runs/{run}/preempt reported."""
    RESTORE_ENDED = "restore_ended"
    JOB_ENDED = "job_ended"


class EventBody(msgspec.Struct, frozen=True, kw_only=True):
    """One event as JSON."""

    id: int = 0
    """Strictly increasing, also across restarts; not consecutive."""
    at: float = 0.0
    time: str = ""
    """`at` as in RFC 3339."""
    kind: str
    run: str | None = None
    checkpoint: str | None = None
    detail: dict[str, Any] = {}
    """By kind: docs/how-to/http-api.md."""


class EventsBody(msgspec.Struct, frozen=True, kw_only=True):
    """Events after an id, oldest first."""

    items: list[EventBody]
    last_id: int
    """The id to continue from."""
    gap: bool = False
    """Events after the requested id were deleted: list the checkpoints again."""
