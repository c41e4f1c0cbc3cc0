"""Decisions that the daemon's database makes where the store cannot."""

from __future__ import annotations

from urllib.parse import quote

import msgspec

DECISION = "/v1/runs/{run}/attempts/{attempt}/decision"


class DecisionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A proposal: an outcome of the attempt, or the fate of one of its tombstones."""

    proposal: str
    """The document as it would be stored: sealed, two lines."""
    tombstone: str | None = None


class DecisionBody(msgspec.Struct, frozen=True):
    """What was decided first, now or before; it is in the store."""

    document: str


def decision_path(run: str, attempt: str) -> str:
    """Where proposals about an attempt go."""
    return DECISION.format(run=quote(run, safe=""), attempt=quote(attempt, safe=""))
