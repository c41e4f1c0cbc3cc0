"""Tokens and their scopes."""

from __future__ import annotations

from enum import StrEnum

import msgspec

TOKENS = "/v1/tokens"


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


class TokenRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request for a token. runs: globs (* and ?); empty for all runs."""

    name: str
    scopes: list[Scope]
    runs: list[str] = []
    expires_in_s: float | None = None


class RotateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request for a new secret; the old one stays valid for `keep_old_s` seconds."""

    keep_old_s: float = 0.0


class TokenBody(msgspec.Struct, frozen=True, kw_only=True):
    """A token without its secret, which is not stored. Times are in seconds since the epoch."""

    name: str
    scopes: list[Scope]
    runs: list[str]
    created_at: float
    created_by: str
    expires_at: float | None
    used_at: float | None


class NewTokenBody(msgspec.Struct, frozen=True, kw_only=True):
    """A token and its secret, which is returned this once."""

    token: TokenBody
    secret: str


class TokensBody(msgspec.Struct, frozen=True):
    """All tokens, by name."""

    items: list[TokenBody]
