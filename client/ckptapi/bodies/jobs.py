"""Jobs: work of the daemon that takes longer than a request should."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import msgspec

JOBS = "/v1/jobs"
Name = Annotated[str, msgspec.Meta(max_length=200)]


class JobState(StrEnum):
    """What became of a job. All but the first two are final."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"
    """The daemon that ran it ended; what it had done is done. Start it again if it is still wanted."""

    @property
    def live(self) -> bool:
        """Not ended."""
        return self in (JobState.QUEUED, JobState.RUNNING)


class VerifyJob(msgspec.Struct, frozen=True, kw_only=True, tag="verify", tag_field="kind"):
    """Check every byte of one checkpoint, or of all of a run, or of all runs; past the cache."""

    run: Name | None = None
    checkpoint: Name | None = None


class CollectJob(msgspec.Struct, frozen=True, kw_only=True, tag="gc", tag_field="kind"):
    """Collect orphans, half deletions and expired leases now."""

    run: Name | None = None


JobRequest = VerifyJob | CollectJob


class JobBody(msgspec.Struct, frozen=True, kw_only=True):
    """One job as JSON."""

    id: str
    kind: str
    request: dict[str, Any]
    state: JobState
    created_at: float
    started_at: float | None = None
    ended_at: float | None = None
    done: float = 0
    total: float = 0
    """0 until it is known."""
    unit: str = ""
    """Of the two above: bytes, runs, checkpoints."""
    cancelling: bool = False
    """Somebody asked it to end, and it has not yet."""
    code: str = ""
    """Of the error that ended it."""
    problem: str = ""
    result: dict[str, Any] | None = None
    """By kind: docs/api.md. Of a cancelled or failed one, None."""
    log: str | None = None
    """Its newest lines; None in listings."""


class JobsBody(msgspec.Struct, frozen=True):
    """Jobs, newest first."""

    items: list[JobBody]
