"""Live uploads, shards, and what a probe of the store found."""

from __future__ import annotations

import msgspec

ATTEMPTS = "/v1/attempts"
PROBE = "/v1/probe"
MAX_ENTRIES = 10_000


class AttemptBody(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that is neither committed nor aborted yet."""

    run: str
    step: int
    attempt: str
    begun_at: float
    written_at: float | None
    """When an object of it last became visible, by the store's clock; None: none has."""
    age_s: float
    num_receipts: int
    world_size: int | None
    """None until the first receipt is there."""
    missing_ranks: list[int]
    """Those without a receipt: a hundred at most."""
    num_shards: int
    stored_bytes: int
    """Of what is visible: object stores show a shard when it is complete."""


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
    """What the daemon needs, each "ok" or what is wrong with it."""

    ready: bool
    database: str
    store: str
    leaving: bool


class AboutBody(msgspec.Struct, frozen=True, kw_only=True):
    """A daemon as its clients see it."""

    version: str
    at: float | None
    """Seconds since the epoch, by its clock; None if it does not tell."""
