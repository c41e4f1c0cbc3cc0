"""Decisions by the daemon's database, for stores that overwrite on create."""

from __future__ import annotations

import msgspec

DECISIONS = "/v1/decisions"


class DecisionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A proposal: an outcome of an attempt, the fate of one of its tombstones, or a generation."""

    run: str
    attempt: str = ""
    """Empty for a generation."""
    tombstone: str | None = None
    generation: int | None = None
    """Its number."""
    proposal: str
    """The document as it would be stored: sealed, two lines of text."""


class DecisionBody(msgspec.Struct, frozen=True):
    """The decision, which is the first proposal; it is in the store."""

    document: str
