"""Declining: a rank that takes no part in an attempt decides it as aborted, so that no other rank waits for it."""

from __future__ import annotations

import re

from ckptstore.clock import Clock
from ckptstore.commit import decide
from ckptstore.format.documents import Outcome
from ckptstore.names import Attempt
from ckptstore.stores import Store

_DECLINED = re.compile(r"rank (\d{1,9}) skipped it")


def decline(store: Store, run: str, attempt: Attempt, rank: int, clock: Clock) -> None:
    """Decide that an attempt will never be whole; durable on return. Only for a rank that writes no receipt for it.

    Raises StoreUnavailable if that could not be told: the other ranks wait in vain, then.
    """
    decide(store, run, attempt, None, clock, by=f"rank {rank} skipped it")


def declined_by(outcome: Outcome) -> int | None:
    """The rank that declined the attempt; None if something else became of it."""
    match = _DECLINED.fullmatch(outcome.by) if outcome.committed is None else None
    return int(match[1]) if match else None
