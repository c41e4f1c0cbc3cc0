"""What the daemon and its clients say to each other over HTTP: paths and JSON bodies, each written once."""

from __future__ import annotations

import msgspec

from ckptstore.catalog import Checkpoint, State
from ckptstore.names import Attempt

CHECKPOINTS = "/v1/checkpoints"
LATEST = "/v1/checkpoints/latest"
RUNS = "/v1/runs"
NOTIFY = "/v1/notify"
PRUNE = "/v1/prune"
REINDEX = "/v1/reindex"
LEASES = "/v1/leases"
PROBLEM = "application/problem+json"
MAX_PAGE = 500


class CheckpointBody(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint as JSON."""

    id: str
    run: str
    step: int
    attempt: str
    state: State
    committed_at: float
    created_at: float
    save_seconds: float
    world_size: int
    raw_bytes: int
    stored_bytes: int
    num_entries: int
    num_shards: int
    manifest_digest: str
    manifest_bytes: int
    metrics: dict[str, float]
    problem: str = ""

    @staticmethod
    def of(checkpoint: Checkpoint) -> CheckpointBody:
        """The body for a checkpoint."""
        return CheckpointBody(
            id=checkpoint.id,
            run=checkpoint.run,
            step=checkpoint.step,
            attempt=str(checkpoint.attempt),
            state=checkpoint.state,
            committed_at=checkpoint.committed_at,
            created_at=checkpoint.created_at,
            save_seconds=checkpoint.save_seconds,
            world_size=checkpoint.world_size,
            raw_bytes=checkpoint.raw_bytes,
            stored_bytes=checkpoint.stored_bytes,
            num_entries=checkpoint.num_entries,
            num_shards=checkpoint.num_shards,
            manifest_digest=checkpoint.manifest_digest,
            manifest_bytes=checkpoint.manifest_bytes,
            metrics=checkpoint.metrics,
            problem=checkpoint.problem,
        )

    def checkpoint(self) -> Checkpoint:
        """The checkpoint this body describes. Raises InvalidName."""
        return Checkpoint(
            run=self.run,
            attempt=Attempt.parse(self.attempt),
            state=self.state,
            committed_at=self.committed_at,
            created_at=self.created_at,
            world_size=self.world_size,
            raw_bytes=self.raw_bytes,
            stored_bytes=self.stored_bytes,
            num_entries=self.num_entries,
            num_shards=self.num_shards,
            manifest_digest=self.manifest_digest,
            manifest_bytes=self.manifest_bytes,
            metrics=self.metrics,
            problem=self.problem,
        )


class Page(msgspec.Struct, frozen=True):
    """One page of a listing; an opaque cursor leads to the next."""

    items: list[CheckpointBody]
    next_cursor: str | None = None


class RunBody(msgspec.Struct, frozen=True, kw_only=True):
    """One run as JSON."""

    run: str
    num_checkpoints: int
    stored_bytes: int
    latest: CheckpointBody | None = None


class RunsBody(msgspec.Struct, frozen=True):
    """All runs."""

    items: list[RunBody]


class NotifyRequest(msgspec.Struct, frozen=True):
    """A saver says that it committed an attempt."""

    run: str
    attempt: str


class PruneRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Prune one run, or all."""

    keep_last: int
    run: str | None = None
    dry_run: bool = True


class PruneItem(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint in a prune plan. No reasons: it goes."""

    checkpoint: CheckpointBody
    reasons: list[str]


class PruneBody(msgspec.Struct, frozen=True, kw_only=True):
    """What a prune does or did."""

    dry_run: bool
    items: list[PruneItem]
    freed_bytes: int
    held: list[str]
    """Ids of checkpoints that were to go and were spared."""


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Protect a checkpoint from deletion."""

    id: str
    holder: str
    ttl_s: float


class LeaseBody(msgspec.Struct, frozen=True, kw_only=True):
    """A lease that was granted."""

    run: str
    lease: str


class ReindexBody(msgspec.Struct, frozen=True, kw_only=True):
    """What a reindex found."""

    runs: int
    checkpoints: int


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """An error as application/problem+json (RFC 9457). `code` is stable."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    hint: str = ""
    request_id: str = ""
    retryable: bool = False
