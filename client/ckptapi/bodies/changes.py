"""Notifications, leases, reindexing."""

from __future__ import annotations

from typing import Annotated

import msgspec

NOTIFY = "/v1/notify"
REINDEX = "/v1/reindex"
LEASES = "/v1/leases"


class NotifyRequest(msgspec.Struct, frozen=True):
    """A saver reports a committed attempt."""

    run: str
    attempt: str


class PreemptRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The job of a run will be killed; its trainers, which ask for events of the run, save and end."""

    grace_s: float
    """Seconds from now until the kill."""
    reason: str = ""


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Protect a checkpoint from deletion."""

    id: str
    holder: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    ttl_s: Annotated[float, msgspec.Meta(gt=0, le=7 * 24 * 3600)]


class LeaseBody(msgspec.Struct, frozen=True, kw_only=True):
    """A lease that was granted."""

    run: str
    lease: str


class ReindexBody(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a reindex."""

    runs: int
    checkpoints: int
