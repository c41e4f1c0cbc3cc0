"""Tokens: names, digests of secrets, and what they allow. Every method is one transaction, for any thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Row, delete, insert, or_, select, update

from ckptapi.bodies import Scope
from ckptd.index.database import Database, retried
from ckptd.index.tables import tokens
from ckptstore.errors import Conflict, NotFound


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A stored token. The secret itself is not stored."""

    name: str
    digest: str
    """SHA-256 of the secret, in hexadecimal."""
    previous: str | None = None
    """The digest of the previous secret, which is accepted until `previous_until`."""
    previous_until: float | None = None
    scopes: frozenset[Scope]
    runs: tuple[str, ...]
    """Globs; empty for all runs."""
    created_at: float
    created_by: str
    expires_at: float | None
    used_at: float | None = None


@dataclass
class TokenIndex:
    """The tokens of the daemons that share a database. They cannot be rebuilt from the store."""

    _database: Database

    def all(self) -> list[Token]:
        """All of them, by name."""
        return [_token(row) for row in self._database.rows(select(tokens).order_by(tokens.c.name))]

    @retried
    def create(self, token: Token) -> None:
        """Add one; durable on return. Raises Conflict."""
        with self._database.write() as connection:
            if connection.scalar(select(tokens.c.name).where(tokens.c.name == token.name)) is not None:
                raise Conflict(
                    f"token {token.name!r} exists already", "Choose another name, rotate it, or revoke it first"
                )
            connection.execute(insert(tokens).values({**asdict(token), "scopes": sorted(token.scopes)}))

    @retried
    def rotate(self, name: str, digest: str, previous_until: float) -> Token:
        """Give a token a new secret; the old one stays valid until then. Durable on return. Raises NotFound."""
        with self._database.write() as connection:
            changed = connection.execute(
                update(tokens)
                .where(tokens.c.name == name)
                .values(digest=digest, previous=tokens.c.digest, previous_until=previous_until)
            )
            if not changed.rowcount:
                raise _missing(name)
            return _token(connection.execute(select(tokens).where(tokens.c.name == name)).one())

    def delete(self, name: str) -> None:
        """Remove one; durable on return. Raises NotFound."""
        if not self._database.change(delete(tokens).where(tokens.c.name == name)):
            raise _missing(name)

    @retried
    def note_use(self, used_at: Mapping[str, float]) -> None:
        """Note when tokens were last used; an earlier time changes nothing."""
        with self._database.write() as connection:
            for name, at in sorted(used_at.items()):
                later = or_(tokens.c.used_at.is_(None), tokens.c.used_at < at)
                connection.execute(update(tokens).where(tokens.c.name == name, later).values(used_at=at))


def _token(row: Row[Any]) -> Token:
    return Token(**{**row._mapping, "scopes": frozenset(map(Scope, row.scopes)), "runs": tuple(row.runs)})


def _missing(name: str) -> NotFound:
    return NotFound(f"there is no token {name!r}", "ckptctl token ls lists the tokens")
