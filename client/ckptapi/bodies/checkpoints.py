"""Checkpoints and runs."""

from __future__ import annotations

from dataclasses import fields

import msgspec

from ckptstore import human
from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.names import Attempt

CHECKPOINTS = "/v1/checkpoints"
LATEST = "/v1/checkpoints/latest"
RUNS = "/v1/runs"
MAX_PAGE = 500


class CheckpointBody(msgspec.Struct, frozen=True, kw_only=True):
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
    not_finite: int | None = None
    """Number of elements that are NaN or Inf; null: it was saved without statistics."""
    tiers: list[str] = []
    """Where it is: `near`, `far`; empty: it was read from a single store."""
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


class Page(msgspec.Struct, frozen=True):
    """One page of a listing, with an opaque cursor for the next one."""

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
