"""Errors."""

from __future__ import annotations

import msgspec

PROBLEM = "application/problem+json"


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
