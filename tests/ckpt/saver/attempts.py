"""Attempts of one trainer, as the saver gets them. In an empty store they are of generation 1."""

from __future__ import annotations

from ckptstore.clock import system_clock
from ckptstore.commits.generations import NewAttempt, Session
from ckptstore.names import Attempt, new_ulid

SESSION = Session(new_ulid(system_clock()), None)


def new_attempt(step: int) -> NewAttempt:
    """An attempt whose generation is not known yet."""
    return NewAttempt(SESSION, step, new_ulid(system_clock()))


def stored(attempt: NewAttempt) -> Attempt:
    """Its name in the store."""
    return attempt.of(1)
