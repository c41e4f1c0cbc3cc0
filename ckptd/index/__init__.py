"""The index: what the store holds, and the restores under way, in SQL. All SQL of the project is here."""

from ckptd.index.checkpoints import Index, IndexedAttempts, Position, RunSummary
from ckptd.index.database import Database
from ckptd.index.restores import RankProgress, Restore, RestoreIndex

__all__ = [
    "Database",
    "Index",
    "IndexedAttempts",
    "Position",
    "RankProgress",
    "Restore",
    "RestoreIndex",
    "RunSummary",
]
