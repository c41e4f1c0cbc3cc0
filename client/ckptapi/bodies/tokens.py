"""Tokens over HTTP: what they may be used for, and what the daemon says of them."""

from __future__ import annotations

from enum import StrEnum

import msgspec

TOKENS = "/v1/tokens"


class Scope(StrEnum):
    """What a token may be used for. ADMIN includes the others; they do not include each other."""

    READ = "read"
    """Look, download, restore, and hold a lease on what is read."""
    WRITE = "write"
    """What trainers do: announce and decide commits."""
    PRUNE = "prune"
    """Delete, take deletions back, pin and unpin."""
    ADMIN = "admin"
    """Everything, tokens included."""


class TokenRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A token is wanted. runs: globs (* and ?); none: all runs."""

    name: str
    scopes: list[Scope]
    runs: list[str] = []
    expires_in_s: float | None = None


class RotateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A new secret for a token; the old one works for `keep_old_s` more seconds."""

    keep_old_s: float = 0.0


class TokenBody(msgspec.Struct, frozen=True, kw_only=True):
    """A token without its secret, which nobody can tell any more. Times are in seconds since the epoch."""

    name: str
    scopes: list[Scope]
    runs: list[str]
    created_at: float
    created_by: str
    expires_at: float | None
    used_at: float | None


class NewTokenBody(msgspec.Struct, frozen=True, kw_only=True):
    """A token and its secret, which is shown this once."""

    token: TokenBody
    secret: str


class TokensBody(msgspec.Struct, frozen=True):
    """All tokens, by name."""

    items: list[TokenBody]
