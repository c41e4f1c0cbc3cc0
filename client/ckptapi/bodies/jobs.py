"""Jobs: work of the daemon that takes too long for a request."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import msgspec

from ckptstore.reading.rehearsal import MAX_RANKS

JOBS = "/v1/jobs"
Name = Annotated[str, msgspec.Meta(max_length=200)]


class JobState(StrEnum):
    """The state of a job. All but the first two are final."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"
    """The daemon that ran it ended. Its effects so far remain; start it again for the rest."""

    @property
    def live(self) -> bool:
        """Not ended."""
        return self in (JobState.QUEUED, JobState.RUNNING)


class ChunkBody(msgspec.Struct, frozen=True, kw_only=True):
    """One chunk of a checkpoint: the name of its shard, and its number in it."""

    shard: Annotated[str, msgspec.Meta(max_length=32)]
    index: Annotated[int, msgspec.Meta(ge=0)]


class VerifyJob(msgspec.Struct, frozen=True, kw_only=True, tag="verify", tag_field="kind"):
    """Verify every byte of one checkpoint, of a run, or of all runs; bypasses the cache."""

    run: Name | None = None
    checkpoint: Name | None = None
    chunks: Annotated[list[ChunkBody], msgspec.Meta(max_length=1000)] | None = None
    """Of `checkpoint`, only these chunks and all documents: a reader found them damaged. None: all chunks."""
    ranks: Annotated[list[Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]], msgspec.Meta(max_length=16)] | None = None
    """Prove that they restore on so many ranks and on the number that saved. The result has estimates."""


class HealJob(msgspec.Struct, frozen=True, kw_only=True, tag="heal", tag_field="kind"):
    """Like VerifyJob, and write damaged objects again from other checkpoints of the run; includes corrupt ones."""

    run: Name | None = None
    checkpoint: Name | None = None


class CollectJob(msgspec.Struct, frozen=True, kw_only=True, tag="gc", tag_field="kind"):
    """Collect orphans, half deletions and expired leases now."""

    run: Name | None = None


JobRequest = VerifyJob | HealJob | CollectJob


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
    """0 if it is not known yet."""
    unit: str = ""
    """Unit of `done` and `total`: bytes, runs, checkpoints."""
    cancelling: bool = False
    """It was cancelled, but has not ended yet."""
    code: str = ""
    """Code of the error that ended it."""
    problem: str = ""
    result: dict[str, Any] | None = None
    """By kind: docs/how-to/http-api.md. None if it was cancelled or failed."""
    log: str | None = None
    """Its last lines; None in listings."""


class JobsBody(msgspec.Struct, frozen=True):
    """Jobs, newest first."""

    items: list[JobBody]
