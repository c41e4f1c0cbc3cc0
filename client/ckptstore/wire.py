"""What the daemon and its clients say to each other over HTTP: paths and JSON bodies, each written once."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

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
RESTORES = "/v1/restores"
PROBLEM = "application/problem+json"
MAX_PAGE = 500
MAX_WORLD_SIZE = 1 << 20
MAX_WAIT_S = 60.0
MAX_SILENCE_S = 24 * 3600.0
SILENCE_S = 300.0


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


class RestoreState(StrEnum):
    """What became of a restore session. All but the first are final."""

    RESTORING = "restoring"
    RESTORED = "restored"
    """All ranks are."""
    FAILED = "failed"
    """One rank said so."""
    EXPIRED = "expired"
    """A rank was silent for too long, or never came."""
    CANCELLED = "cancelled"


class Phase(StrEnum):
    """How far a rank is with its restore."""

    JOINED = "joined"
    PLANNING = "planning"
    FETCHING = "fetching"
    PLACING = "placing"
    RESTORED = "restored"
    FAILED = "failed"


WorldSize = Annotated[int, msgspec.Meta(ge=1, le=MAX_WORLD_SIZE)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=MAX_WORLD_SIZE)]
Bytes = Annotated[int, msgspec.Meta(ge=0, lt=1 << 60)]


class RestoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One rank joins the restore of its job. The first of a run and key resolves the checkpoint for all."""

    run: str
    key: str
    world_size: WorldSize
    rank: Rank
    checkpoint: str | None = None
    """An id; None: the newest usable one."""
    ttl_s: Annotated[float, msgspec.Meta(ge=1, le=MAX_SILENCE_S)] = SILENCE_S
    """A rank that is silent for so long ends the session; the first one's counts."""


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """A rank says how far it is."""

    phase: Phase
    done_bytes: Bytes = 0
    total_bytes: Bytes = 0
    """0 until it is known."""
    problem: str = ""


class RestoreStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a report: how the session as a whole is doing."""

    id: str
    state: RestoreState
    world_size: int
    num_joined: int
    num_restored: int
    problem: str = ""


class RankBody(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one rank."""

    rank: int
    phase: Phase
    done_bytes: int
    total_bytes: int
    updated_at: float
    problem: str = ""


class RestoreBody(msgspec.Struct, frozen=True, kw_only=True):
    """One restore session as JSON."""

    id: str
    run: str
    key: str
    checkpoint: CheckpointBody
    world_size: int
    ttl_s: float
    state: RestoreState
    created_at: float
    expires_at: float | None
    """When it expires if nobody reports any more; None once it ended."""
    ended_at: float | None
    num_joined: int
    num_restored: int
    done_bytes: int
    total_bytes: int
    """Of the ranks that know theirs."""
    problem: str
    """Why it failed or expired, with the ranks to blame."""
    progress: float | None = None
    """From 0 to 1, the mean over all ranks. As the next two, told only where ranks were looked at: not to a join."""
    stragglers: list[int] = []
    """Behind the others: a hundred at most."""
    slowest: RankBody | None = None
    """Of those that joined and are not restored."""
    ranks: list[RankBody] | None = None
    """Those that joined, by rank; None in listings and where they were not asked for."""


class RestoresBody(msgspec.Struct, frozen=True):
    """Restore sessions, newest first."""

    items: list[RestoreBody]


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
