"""Attempts of one trainer, and messages to its saver. In an empty store the attempts are of generation 1."""

from __future__ import annotations

from typing import Any

from ckpt.saver.messages import SaveJob, Setup
from ckptstore.clock import system_clock
from ckptstore.commits.generations import NewAttempt, Session
from ckptstore.format.shards import Placed, Slice
from ckptstore.names import Attempt, new_ulid

SESSION = Session(new_ulid(system_clock()), None)


def new_attempt(step: int) -> NewAttempt:
    return NewAttempt(SESSION, step, new_ulid(system_clock()))


def stored(attempt: NewAttempt) -> Attempt:
    """Its name in the store."""
    return attempt.of(1)


def new_setup(store: str, **changed: Any) -> Setup:
    """Of the only rank of run r, unless that is changed."""
    given: dict[str, Any] = {"options": {}, "run": "r", "rank": 0, "world_size": 1, "compress": "off"}
    return Setup(store=store, **{**given, "peer_timeout_s": 20.0, "daemon": None, "token": None, **changed})


def new_job(attempt: NewAttempt, count: int = 0, **changed: Any) -> SaveJob:
    """The first save: of `model/w`, so many numbers, if any."""
    given: dict[str, Any] = {"number": 1, "slot": 0 if count else None, "created_at": system_clock(), "slices": []}
    given |= {"aliases": {}, "trees": {}, "local": {}, "metrics": {}, "lease": None}
    if count:
        given["slices"] = [Placed(Slice("model/w", "float32", (count,), (0, count)), 0)]
        given["trees"] = {"model": {"w": {"$": "tensor", "name": "model/w"}}}
    return SaveJob(attempt=attempt, **{**given, **changed})
