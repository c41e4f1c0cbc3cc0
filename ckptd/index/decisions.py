"""Decisions that the store cannot make itself. Every method is one transaction, for any thread.

Unlike the rest of the index, this table is not a cache while a decision is pending: it records the first proposal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import ColumnElement, delete, insert, select, update

from ckptd.index.database import Database, retried
from ckptd.index.tables import decisions


class Decision(NamedTuple):
    """The first proposal for a key of the store."""

    key: str
    document: bytes
    decided_at: float
    stored: bool
    """It was written to the store."""


@dataclass
class DecisionIndex:
    """The decisions of the daemons that share a database."""

    _database: Database

    def find(self, key: str) -> Decision | None:
        """The decision about a key."""
        return next(iter(self._all(decisions.c.key == key)), None)

    def unstored(self) -> list[Decision]:
        """Decisions that are not marked as written to the store."""
        return self._all(~decisions.c.stored)

    @retried
    def create(self, proposal: Decision) -> Decision:
        """Record a proposal; returns the decision: what is in the store, or else the first proposal for the key.

        The row is locked, which only the server that takes writes can do.
        """
        with self._database.write() as connection:
            same = decisions.c.key == proposal.key
            row = connection.execute(select(decisions).where(same).with_for_update()).one_or_none()
            if row is not None and (row.stored or not proposal.stored):
                return Decision(**row._mapping)
            # Never deleted and inserted again: who waits for the lock would find no row, and replace the new one.
            write = insert(decisions) if row is None else update(decisions).where(same)
            connection.execute(write.values(proposal._asdict()))
            return proposal

    def mark_stored(self, key: str) -> None:
        """Mark a decision as written to the store."""
        self._database.change(update(decisions).where(decisions.c.key == key).values(stored=True))

    def forget(self, before: float) -> None:
        """Delete decisions that are in the store and older than `before`."""
        self._database.change(delete(decisions).where(decisions.c.stored, decisions.c.decided_at < before))

    def _all(self, condition: ColumnElement[bool]) -> list[Decision]:
        return [Decision(**row._mapping) for row in self._database.rows(select(decisions).where(condition))]
