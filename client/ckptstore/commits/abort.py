"""Declining: a rank that takes no part in an attempt decides it as aborted, so that no other rank waits for it.

It skips the attempt, which is no failure, or it has failed to do its part.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ckptstore.clock import Clock
from ckptstore.commits.commit import decide
from ckptstore.format.documents import Outcome
from ckptstore.names import Attempt
from ckptstore.stores import Store

_MOST_CHARACTERS = 1000
_DECLINED = re.compile(r"rank (\d{1,9}) (?:skipped it|failed: (.+))", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Declined:
    """Who took no part in an attempt."""

    rank: int
    failure: str | None
    """What went wrong there; None if it skipped the attempt."""


def decline(store: Store, run: str, attempt: Attempt, rank: int, clock: Clock, failure: str | None = None) -> None:
    """Decide that an attempt will never be whole; durable on return. Only for a rank that writes no receipt for it.

    failure: what went wrong; None if the rank skips the attempt. Raises StoreUnavailable if that could not be told: the
    other ranks wait in vain, then.
    """
    said = f"failed: {failure[:_MOST_CHARACTERS]}" if failure else "skipped it"
    decide(store, run, attempt, None, clock, by=f"rank {rank} {said}")


def declined_by(outcome: Outcome) -> Declined | None:
    """The rank that declined the attempt; None if something else became of it."""
    match = _DECLINED.fullmatch(outcome.by) if outcome.committed is None else None
    return Declined(int(match[1]), match[2]) if match else None
