"""Paths and JSON bodies of the HTTP API, shared by the daemon and its clients."""

from __future__ import annotations

from dataclasses import fields
from enum import StrEnum
from typing import Annotated, Any, Generic, TypeVar

from msgspec import Meta

from ckptstore import human
from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.format.records import PolicySet
from ckptstore.names import Attempt
from ckptstore.reading.restore_check import MAX_RANKS
from ckptstore.retention.policy import KeepDecision
from ckptstore.retention.pruning import MAX_DELETE_FRACTION, PrunePlan
from ckptstore.values import Record, Value

CHECKPOINTS = "/v1/checkpoints"
LATEST = "/v1/checkpoints/latest"
RUNS = "/v1/runs"
RESTORES = "/v1/restores"
EVENTS = "/v1/events"
JOBS = "/v1/jobs"
PRUNE = "/v1/prune"
POLICIES = "/v1/policies"
DELETED = "/v1/deleted"
AUDIT = "/v1/audit"
PINS = "/v1/pins"
NOTIFY = "/v1/notify"
REINDEX = "/v1/reindex"
LEASES = "/v1/leases"
DECISIONS = "/v1/decisions"
ATTEMPTS = "/v1/attempts"
PROBE = "/v1/probe"
GOODPUT = "/v1/goodput"
TOKENS = "/v1/tokens"

PROBLEM = "application/problem+json"


class Problem(Record):
    """An error as application/problem+json (RFC 9457). `code` is stable."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    hint: str = ""
    request_id: str = ""
    retryable: bool = False


MAX_PAGE = 500
_T = TypeVar("_T")


class Items(Value, Generic[_T]):
    """A list, not in pages. Sessions, jobs, audit records and policies are newest first, attempts oldest first."""

    items: list[_T]


class CheckpointBody(Record):
    """One checkpoint as JSON."""

    id: str
    run: str
    step: int
    attempt: str
    generation: int = 0
    state: State
    abandoned_at: float | None = None
    """When it was left behind, by the store's clock; null: it is not abandoned, or the time is not known."""
    parent: str | None = None
    """The attempt from which its generation continues; null: from none, or not known."""
    committed_at: float
    created_at: float
    save_seconds: float
    world_size: int
    raw_bytes: int
    stored_bytes: int
    referenced_bytes: int = 0
    num_entries: int
    num_shards: int
    manifest_digest: str
    manifest_bytes: int
    metrics: dict[str, float]
    tags: dict[str, str] = {}
    problem: str = ""
    optimizer_bytes: int = 0
    """The part of `stored_bytes` that thinning frees."""
    thinned: bool = False
    """Its optimizer state is deleted, or will be; the state `thinned` means: in the live lineage."""
    not_finite: int | None = None
    """Number of elements that are NaN or Inf; null: it was saved without statistics."""
    tiers: list[str] = []
    """Where it is: `local`, `remote`; empty: it was read from a single store."""
    committed: str = ""
    """`committed_at` as in RFC 3339."""
    created: str = ""
    """`created_at` as in RFC 3339."""

    @staticmethod
    def of(checkpoint: Checkpoint) -> CheckpointBody:
        """The body for a checkpoint."""
        return CheckpointBody(
            **{name: getattr(checkpoint, name) for name in _SAME},
            id=checkpoint.id,
            step=checkpoint.step,
            attempt=str(checkpoint.attempt),
            generation=checkpoint.attempt.generation,
            parent=str(checkpoint.parent) if checkpoint.parent is not None else None,
            save_seconds=checkpoint.save_seconds,
            tiers=list(checkpoint.tiers),
            committed=human.rfc3339(checkpoint.committed_at),
            created=human.rfc3339(checkpoint.created_at),
        )

    def checkpoint(self) -> Checkpoint:
        """The checkpoint that this body describes. Raises InvalidName."""
        return Checkpoint(
            **{name: getattr(self, name) for name in _SAME},
            attempt=Attempt.parse(self.attempt),
            parent=Attempt.parse(self.parent) if self.parent is not None else None,
            tiers=tuple(self.tiers),
        )


_SAME = {field.name for field in fields(Checkpoint)} & set(CheckpointBody.__struct_fields__) - {
    "attempt",
    "parent",
    "tiers",
}
"""The fields that a checkpoint and its body share."""


class Page(Value):
    """One page of a listing, with an opaque cursor for the next one."""

    items: list[CheckpointBody]
    next_cursor: str | None = None


class RunBody(Record):
    """One run as JSON."""

    run: str
    num_checkpoints: int
    stored_bytes: int
    latest: CheckpointBody | None = None


MAX_WORLD_SIZE = 1 << 20
MAX_WAIT_S = 60.0
MAX_SILENCE_S = 24 * 3600.0
SILENCE_S = 300.0


class RestoreState(StrEnum):
    """The state of a restore session. All but the first are final."""

    RESTORING = "restoring"
    RESTORED = "restored"
    """All ranks are restored."""
    FAILED = "failed"
    """One rank reported a failure."""
    EXPIRED = "expired"
    """A rank was silent for too long, or never joined."""
    CANCELLED = "cancelled"

    @property
    def live(self) -> bool:
        """Not ended."""
        return self is RestoreState.RESTORING


class Phase(StrEnum):
    """The phases of a rank's restore."""

    JOINED = "joined"
    PLANNING = "planning"
    FETCHING = "fetching"
    PLACING = "placing"
    RESTORED = "restored"
    FAILED = "failed"


WorldSize = Annotated[int, Meta(ge=1, le=MAX_WORLD_SIZE)]
Rank = Annotated[int, Meta(ge=0, lt=MAX_WORLD_SIZE)]
Bytes = Annotated[int, Meta(ge=0, lt=1 << 60)]


class RestoreRequest(Record):
    """One rank joins the restore of its job. The first request of a run and key resolves the checkpoint for all."""

    run: str
    key: str
    world_size: WorldSize
    rank: Rank
    checkpoint: str | None = None
    """An id; None for the newest usable one."""
    ttl_s: Annotated[float, Meta(ge=1, le=MAX_SILENCE_S)] = SILENCE_S
    """A rank that is silent for this time ends the session. The first request sets it."""
    host: Annotated[str, Meta(max_length=255)] = ""
    """The host of the rank, for display."""


class RankReport(Record):
    """The progress report of a rank."""

    phase: Phase
    done_bytes: Bytes = 0
    total_bytes: Bytes = 0
    """0 until it is known."""
    problem: str = ""


class RestoreStatus(Record):
    """The response to a report: the status of the whole session."""

    id: str
    state: RestoreState
    world_size: int
    num_joined: int
    num_restored: int
    problem: str = ""


class RankBody(Value):
    """The last report of one rank."""

    rank: int
    phase: Phase
    done_bytes: int
    total_bytes: int
    updated_at: float
    problem: str = ""

    @property
    def fraction(self) -> float:
        """The fraction of its restore that it has done, from 0 to 1."""
        if self.phase is Phase.RESTORED:
            return 1.0
        return min(1.0, self.done_bytes / self.total_bytes) if self.total_bytes else 0.0


class RestoreBody(Record):
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
    """When it expires without further reports; None after it ended."""
    ended_at: float | None
    num_joined: int
    num_restored: int
    done_bytes: int
    total_bytes: int
    """Sum over the ranks that know their total."""
    problem: str
    """Why it failed or expired, with the ranks that caused it."""
    host: str = ""
    """The host of rank 0, or of the rank that joined first until rank 0 does. Empty if it is not known."""
    progress: float | None = None
    """From 0 to 1, the mean over all ranks. This and the next two are set only if ranks were read: not for a join."""
    stragglers: list[int] = []
    """Ranks that are behind the others, a hundred at most."""
    slowest: RankBody | None = None
    """The slowest rank that joined and is not restored."""
    ranks: list[RankBody] | None = None
    """The ranks that joined; None in listings and if they were not requested."""


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


class EventBody(Record):
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


class EventsBody(Record):
    """Events after an id, oldest first."""

    items: list[EventBody]
    last_id: int
    """The id to continue from."""
    gap: bool = False
    """Events after the requested id were deleted: list the checkpoints again."""
    at: float | None = None
    """The daemon's clock, to which the times of events belong."""


Name = Annotated[str, Meta(max_length=200)]


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


class ChunkBody(Record):
    """One chunk of a checkpoint: the name of its shard, and its number in it."""

    shard: Annotated[str, Meta(max_length=32)]
    index: Annotated[int, Meta(ge=0)]


class VerifyJob(Record, tag="verify", tag_field="kind"):
    """Verify every byte of one checkpoint, of a run, or of all runs; bypasses the cache."""

    run: Name | None = None
    checkpoint: Name | None = None
    chunks: Annotated[list[ChunkBody], Meta(max_length=1000)] | None = None
    """Of `checkpoint`, only these chunks and all documents: a reader found them damaged. None: all chunks."""
    ranks: Annotated[list[Annotated[int, Meta(ge=1, le=MAX_RANKS)]], Meta(max_length=16)] | None = None
    """Prove that they restore on so many ranks and on the number that saved. The result has estimates."""


class HealJob(Record, tag="heal", tag_field="kind"):
    """Like VerifyJob, and write damaged objects again from other checkpoints of the run; includes corrupt ones."""

    run: Name | None = None
    checkpoint: Name | None = None


class CollectJob(Record, tag="gc", tag_field="kind"):
    """Collect orphans, half deletions and expired leases now."""

    run: Name | None = None


JobRequest = VerifyJob | HealJob | CollectJob


class JobBody(Record):
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


Reason = Annotated[str, Meta(max_length=1000)]


class PruneItem(Record):
    """One checkpoint in a prune plan. It is removed if there are no reasons to keep it."""

    checkpoint: CheckpointBody
    reasons: list[str]
    thins: bool = False
    """It stays, and its optimizer state is removed."""


class PruneBody(Record):
    """The effect of a prune."""

    dry_run: bool
    items: list[PruneItem]
    freed_bytes: int
    """Stored bytes of the removed checkpoints and optimizer state; freed after the grace."""
    held: list[str]
    """Ids of checkpoints that the policy does not keep, but something held."""
    grace_s: float = 0.0
    """Time during which it can be undeleted."""
    max_delete_fraction: float = MAX_DELETE_FRACTION
    """The largest fraction of a run that is removed without confirmation."""

    @staticmethod
    def of(plan: PrunePlan, dry_run: bool) -> PruneBody:
        """The body for a plan, before or after it was applied."""
        return PruneBody(
            dry_run=dry_run,
            items=[
                PruneItem(checkpoint=CheckpointBody.of(one), reasons=list(reasons), thins=thins)
                for one, reasons, thins in plan.decisions
            ],
            freed_bytes=plan.freed_bytes,
            held=[checkpoint.id for checkpoint in plan.held],
            grace_s=plan.grace_s,
            max_delete_fraction=plan.max_delete_fraction,
        )

    def plan(self) -> PrunePlan:
        """The plan that the body describes."""
        decisions = tuple(KeepDecision(i.checkpoint.checkpoint(), tuple(i.reasons), i.thins) for i in self.items)
        held = tuple(d.checkpoint for d in decisions if d.checkpoint.id in self.held)
        runs = dict.fromkeys(decision.checkpoint.run for decision in decisions)
        return PrunePlan(decisions, tuple(runs), self.grace_s, self.max_delete_fraction, held=held)


class PoliciesRequest(Record):
    """Replace the policies."""

    expected: int
    """The version to replace; 0 for none."""
    policies: PolicySet
    reason: Reason = ""


class LabelsRequest(Record):
    """Values to set; null removes one. Removing a metric restores its value from the save."""

    tags: dict[str, str | None] = {}
    metrics: dict[str, float | None] = {}
    reason: Reason = ""


class UndeleteRequest(Value):
    """Undo a deletion."""

    reason: Reason = ""


class NotifyRequest(Value):
    """A saver reports a committed attempt."""

    run: str
    attempt: str


class PreemptRequest(Record):
    """The job of a run will be killed; its trainers, which ask for events of the run, save and end."""

    grace_s: float
    """Seconds from now until the kill."""
    reason: str = ""


class LeaseRequest(Record):
    """Protect a checkpoint from deletion."""

    id: str
    holder: Annotated[str, Meta(min_length=1, max_length=256)]
    ttl_s: Annotated[float, Meta(gt=0, le=7 * 24 * 3600)]
    thinned: bool = False
    """Its optimizer state is not needed."""


class LeaseBody(Record):
    """A lease that was granted."""

    run: str
    lease: str


class ReindexBody(Record):
    """The result of a reindex."""

    runs: int
    checkpoints: int


class DecisionRequest(Record):
    """A proposal: an outcome of an attempt, the sweep decision of one of its tombstones, or a generation."""

    run: str
    attempt: str = ""
    """Empty for a generation."""
    tombstone: str | None = None
    generation: int | None = None
    """Its number."""
    proposal: str
    """The document as it would be stored: sealed, two lines of text."""


class DecisionBody(Value):
    """The decision, which is the first proposal; it is in the store."""

    document: str


MAX_ENTRIES = 10_000


class AttemptBody(Record):
    """An attempt that is neither committed nor aborted yet."""

    run: str
    step: int
    attempt: str
    begun_at: float
    written_at: float | None
    """When its last object became visible, by the store's clock; None without objects."""
    age_s: float
    num_receipts: int
    world_size: int | None
    """None before the first receipt."""
    missing_ranks: list[int]
    """Ranks without a receipt, a hundred at most."""
    num_shards: int
    stored_bytes: int
    """Bytes of visible objects: object stores list a shard only after its upload is complete."""


class ShardBody(Record):
    """One shard of a checkpoint."""

    name: str
    rank: int
    num_chunks: int
    num_entries: int
    raw_bytes: int
    stored_bytes: int


class EntryBody(Record):
    """One entry of a checkpoint."""

    name: str
    dtype: str
    shape: list[int]
    num_slices: int
    raw_bytes: int


class EntriesBody(Value):
    """A page of entries, by position in the manifest."""

    items: list[EntryBody]
    total: int
    next_offset: int | None = None


class ReadinessBody(Record):
    """The dependencies of the daemon, each "ok" or its problem."""

    ready: bool
    database: str
    store: str
    leaving: bool


class AboutBody(Record):
    """The version and the clock of a daemon."""

    version: str
    at: float | None
    """Seconds since the epoch, by its clock; None if it is unknown."""


class Scope(StrEnum):
    """The permissions of a token. ADMIN includes the others; they do not include each other."""

    READ = "read"
    """List, download, restore, and hold leases."""
    WRITE = "write"
    """Save: notify of commits, and decide them."""
    PRUNE = "prune"
    """Delete, undelete, pin and unpin."""
    ADMIN = "admin"
    """Everything, including tokens."""


class TokenRequest(Record):
    """The request for a token. runs: globs (* and ?); empty for all runs."""

    name: str
    scopes: list[Scope]
    runs: list[str] = []
    expires_in_s: float | None = None


class RotateRequest(Record):
    """The request for a new secret; the old one stays valid for `keep_old_s` seconds."""

    keep_old_s: float = 0.0


class TokenBody(Record):
    """A token without its secret, which is not stored. Times are in seconds since the epoch."""

    name: str
    scopes: list[Scope]
    runs: list[str]
    created_at: float
    created_by: str
    expires_at: float | None
    used_at: float | None


class NewTokenBody(Record):
    """A token and its secret, which is returned this once."""

    token: TokenBody
    secret: str
