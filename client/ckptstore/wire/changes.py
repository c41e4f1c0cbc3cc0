"""What changes something: notifications, prunes, leases, reindexing."""

from __future__ import annotations

import msgspec

from ckptstore.wire.checkpoints import CheckpointBody

NOTIFY = "/v1/notify"
PRUNE = "/v1/prune"
REINDEX = "/v1/reindex"
LEASES = "/v1/leases"


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
