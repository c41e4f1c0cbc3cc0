"""Numbering: finds the generation in which the attempts of a session are saved, on any rank.

It is created before the first upload of the session, never on the training thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ckptstore.commits.catalog import newest_first
from ckptstore.commits.generations import NewAttempt, Session, begin_generation
from ckptstore.names import Attempt
from ckptstore.run import Run


class Numbering:
    """The generations of the sessions of one saver. For any thread."""

    def __init__(self, run: Run, warn: Callable[[str], object]) -> None:
        """warn: called with a message for the user, if a session leaves all checkpoints of the run behind."""
        self.run = run
        self._warn = warn
        self._lock = threading.Lock()
        self._numbers: dict[str, int] = {}

    def attempt(self, new: NewAttempt) -> Attempt:
        """The attempt with its generation, which is durable on return. Raises Unavailable."""
        session = new.session
        with self._lock:
            if session.id not in self._numbers:
                self._numbers[session.id] = self._begin(session)
            return new.of(self._numbers[session.id])

    def session_of(self, generation: int) -> str | None:
        """The session of this saver with that generation."""
        with self._lock:
            return next((session for session, number in self._numbers.items() if number == generation), None)

    def _begin(self, session: Session) -> int:
        begun = begin_generation(self.run, session)
        if begun.created and session.parent is None:
            self._warn_of_abandoned(begun.number)
        return begun.number

    def _warn_of_abandoned(self, number: int) -> None:
        newest = next((c for c in newest_first(self.run) if c.attempt.generation < number), None)
        if newest is not None:
            self._warn(
                f"run {self.run.name!r} has checkpoints, the newest is {newest.id}, and this trainer restored none of "
                f"them. From its first commit on it is the run's newest generation ({number}), and all earlier "
                "checkpoints are abandoned: they are not restored unless they are named. Restore before the first save "
                "to continue the run, or use another run"
            )
