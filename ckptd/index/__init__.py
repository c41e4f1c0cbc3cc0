"""The index: checkpoints of the store, and restore sessions, in SQL. All SQL of the project is here."""

from ckptd.index.checkpoints import BegunGeneration, Index, IndexedAttempts, Reading, RunChanged, RunSummary, Stamp
from ckptd.index.database import Database, Fence
from ckptd.index.decisions import Decision, DecisionIndex
from ckptd.index.events import EventLog
from ckptd.index.jobs import JobIndex
from ckptd.index.leaders import LeaderIndex, Tenure
from ckptd.index.listing import Found, Listing, PageKey, key_types
from ckptd.index.restores import Restore, RestoreIndex
from ckptd.index.tokens import Token, TokenIndex

__all__ = [
    "BegunGeneration",
    "Database",
    "Decision",
    "DecisionIndex",
    "EventLog",
    "Fence",
    "Found",
    "Index",
    "IndexedAttempts",
    "JobIndex",
    "LeaderIndex",
    "Listing",
    "PageKey",
    "Reading",
    "Restore",
    "RestoreIndex",
    "RunChanged",
    "RunSummary",
    "Stamp",
    "Tenure",
    "Token",
    "TokenIndex",
    "key_types",
]
