"""TrainerSession: what the saves of a trainer have in common until its next restore. For the training thread.

All ranks make the same calls in the same order, so each derives the same session and the same attempts.
"""

from __future__ import annotations

from collections import Counter

from ckpt.snapshot.handle import HandleUpdates
from ckptstore.commits.catalog import Checkpoint
from ckptstore.commits.generations import NewAttempt, Session
from ckptstore.errors import InvalidRequest, Superseded
from ckptstore.names import Attempt, derive_ulid


class TrainerSession:
    """The current session: its parent, and the steps that were saved in it."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._restores = 0
        self._continues = False
        """Whether it has resumed a training run, or saved."""
        self._parent: Attempt | None = None
        self.seen = 0
        """The newest generation that a restore saw in the far store; see Session."""
        self._begin()

    def _begin(self) -> None:
        self._session: Session | None = None
        """Known from the first save on."""
        self._calls: Counter[int] = Counter()
        self._committed: set[int] = set()
        self._pending: list[HandleUpdates] = []
        """The saves that had not ended at the last call. Ended ones are released: a job may run for months."""
        self._superseded: Superseded | None = None

    def restored(self, checkpoint: Checkpoint, trains: bool) -> bool:
        """Begin a new session: training continues from this checkpoint. Returns whether it does.

        trains: an optimizer was restored, on any rank. Without one, only the first restore of a trainer counts: later
        ones are of other models, such as a teacher or an average, and change nothing.
        """
        if self._continues and not trains:
            return False
        self._restores += 1
        self._continues = trains
        self._parent = checkpoint.attempt if checkpoint.run == self._run else None
        self._begin()
        return True

    @property
    def parent(self) -> str | None:
        """The attempt of this run from which training continues."""
        return str(self._parent) if self._parent is not None else None

    def new_attempt(self, agreed: str, step: int) -> NewAttempt:
        """The attempt of a call that saves `step`, even if it fails: all ranks count their calls.

        agreed: the ULID that the ranks agreed on.
        """
        if self._session is None:
            id = derive_ulid(agreed, "session", self._restores) if self._restores else agreed
            self._session = Session(id, self._parent, self.seen)
        number = self._calls[step]
        self._calls[step] += 1
        return NewAttempt(self._session, step, derive_ulid(self._session.id, step, number), number)

    def check(self, step: int, repeat: bool = False) -> None:
        """Raises Superseded if another trainer has superseded the session, or InvalidRequest if the step was saved.

        repeat: it may be saved more than once in a session.
        """
        ended = [updates for updates in self._pending if updates.handle.done()]
        self._pending = [updates for updates in self._pending if updates not in ended]
        for updates in ended:
            if updates.error is None:
                self._committed.add(updates.handle.step)
            elif isinstance(updates.error, Superseded):
                self._superseded = updates.error
        if self._superseded is not None:
            raise self._superseded
        under_way = any(updates.handle.step == step for updates in self._pending)
        if (under_way or step in self._committed) and not repeat:
            raise InvalidRequest(
                f"step {step} of run {self._run!r} was saved already, and nothing was restored since",
                "Save each step once, or pass repeat_step=True",
            )

    def saved(self, updates: HandleUpdates) -> None:
        """A save has begun."""
        self._continues = True
        self._pending.append(updates)
