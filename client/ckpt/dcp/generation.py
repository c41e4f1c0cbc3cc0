"""The generation of what DCP saves: a new one after each load of the same run in this process.

A process that has loaded nothing of a run saves in the newest generation that has begun.
"""

from __future__ import annotations

from ckptstore.clock import system_clock
from ckptstore.commits.catalog import Checkpoint
from ckptstore.commits.generations import Session, begin_generation, newest_generation
from ckptstore.names import new_ulid
from ckptstore.run import Run

_sessions: dict[tuple[str, str], Session] = {}
"""By URL of the store and run: begun by the last load of this process."""


def loaded(url: str, checkpoint: Checkpoint) -> None:
    """A checkpoint was loaded from the store at `url`: saves of its run continue from it."""
    _sessions[url, checkpoint.run] = Session(new_ulid(system_clock()), checkpoint.attempt)


def generation_for_save(run: Run) -> int:
    """The generation of the next save; durable on return. Raises Unavailable."""
    session = _sessions.get((run.store.url, run.name))
    return begin_generation(run, session).number if session is not None else newest_generation(run)
