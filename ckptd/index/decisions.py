"""Decisions that the store cannot make itself. Every method is one transaction, for any thread.

Unlike the rest of the index, this table is not a cache while a decision is pending: it records the first proposal.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from sqlalchemy import Connection, delete, insert, select, update

from ckptd.index.database import Database, retried
from ckptd.index.tables import decisions


@dataclass(frozen=True, slots=True)
class Decision:
    """The first proposal for a key of the store."""

    key: str
    document: bytes
    decided_at: float
    stored: bool
    """It was written to the store."""


class DecisionIndex:
    """The decisions of the daemons that share a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @retried
    def find(self, key: str) -> Decision | None:
        """The decision about a key."""
        with self._database.read() as connection:
            return _find(connection, key)

    @retried
    def unstored(self) -> list[Decision]:
        """Decisions that are not marked as written to the store."""
        with self._database.read() as connection:
            return [
                Decision(**row._mapping) for row in connection.execute(select(decisions).where(~decisions.c.stored))
            ]

    @retried
    def create(self, proposal: Decision) -> Decision:
        """Record a proposal; returns the decision: what is in the store, or else the first proposal for the key.

        The row is locked, which only the server that takes writes can do.
        """
        with self._database.write() as connection:
            found = _find(connection, proposal.key, lock=True)
            if found is not None and (found.stored or not proposal.stored):
                return found
            # Never deleted and inserted again: who waits for the lock would find no row, and replace the new one.
            same = decisions.c.key == proposal.key
            write = insert(decisions) if found is None else update(decisions).where(same)
            connection.execute(write.values(asdict(proposal)))
            return proposal

    @retried
    def mark_stored(self, key: str) -> None:
        """Mark a decision as written to the store."""
        with self._database.write() as connection:
            connection.execute(update(decisions).where(decisions.c.key == key).values(stored=True))

    @retried
    def forget(self, before: float) -> None:
        """Delete decisions that are in the store and older than `before`."""
        with self._database.write() as connection:
            connection.execute(delete(decisions).where(decisions.c.stored, decisions.c.decided_at < before))


def _find(connection: Connection, key: str, lock: bool = False) -> Decision | None:
    query = select(decisions).where(decisions.c.key == key)
    row = connection.execute(query.with_for_update() if lock else query).one_or_none()
    return Decision(**row._mapping) if row is not None else None
