"""The index: what the store holds, in SQL, for quick answers. A cache; all SQL of the project is here."""

from ckptd.index.checkpoints import Index, IndexedAttempts, Position, RunSummary
from ckptd.index.database import Database

__all__ = ["Database", "Index", "IndexedAttempts", "Position", "RunSummary"]
