"""Live uploads, shards, entries, and the state of the daemon."""

from __future__ import annotations

import msgspec

ATTEMPTS = "/v1/attempts"
PROBE = "/v1/probe"
GOODPUT = "/v1/goodput"
MAX_ENTRIES = 10_000


class AttemptBody(msgspec.Struct, frozen=True, kw_only=True):
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


class AttemptsBody(msgspec.Struct, frozen=True):
    """Attempts, oldest first."""

    items: list[AttemptBody]


class ShardBody(msgspec.Struct, frozen=True, kw_only=True):
    """One shard of a checkpoint."""

    name: str
    rank: int
    num_chunks: int
    num_entries: int
    raw_bytes: int
    stored_bytes: int


class ShardsBody(msgspec.Struct, frozen=True):
    """The shards of a checkpoint, by rank."""

    items: list[ShardBody]


class EntryBody(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a checkpoint."""

    name: str
    dtype: str
    shape: list[int]
    num_slices: int
    raw_bytes: int


class EntriesBody(msgspec.Struct, frozen=True):
    """A page of entries, by position in the manifest."""

    items: list[EntryBody]
    total: int
    next_offset: int | None = None


class ReadinessBody(msgspec.Struct, frozen=True, kw_only=True):
    """The dependencies of the daemon, each "ok" or its problem."""

    ready: bool
    database: str
    store: str
    leaving: bool


class AboutBody(msgspec.Struct, frozen=True, kw_only=True):
    """The version and the clock of a daemon."""

    version: str
    at: float | None
    """Seconds since the epoch, by its clock; None if it is unknown."""
