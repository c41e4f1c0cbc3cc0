"""Work that all ranks of a restore do, each for itself, and the meeting after it: an error on one is raised on all.

A meeting costs more than most of the work between two of them. So work that changes nothing of the caller's is done
in several steps before one meeting. The error that counts is that of the earliest step, as if the ranks had met
after each. NoCheckpoint is the exception: it explains what other ranks found missing or damaged in earlier steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import starmap
from typing import Any, NamedTuple

from ckpt.ranks.world import World
from ckptstore.errors import (
    CkptError,
    CorruptObject,
    NoCheckpoint,
    ObjectMissing,
    RankLost,
    RestoreFailed,
    error_from_code,
)

TRY_NEXT = (CorruptObject, ObjectMissing, NoCheckpoint)
"""Errors that another checkpoint may cure."""


class _Answer(NamedTuple):
    """What one rank says in a meeting: JSON types and bytes."""

    steps: int
    """The steps of the work that it has done."""
    report: Any = None
    error: Sequence[Any] | None = None
    """Code, message, hint and damaged chunks."""


class Together:
    """The meetings of one restore. All ranks call the same methods in the same order."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._error: CkptError | None = None

    def do(self, *steps: Callable[[], object], report: Callable[[], Any] = lambda: None) -> list[Any]:
        """Do the steps one after the other, then meet. Returns every rank's report (JSON types and bytes).

        Raises one rank's error on all ranks: of the earliest step that failed, or NoCheckpoint of any step. Among these
        one that another checkpoint would not cure takes precedence, then NoCheckpoint.
        """
        answers = self._world.gather(self._answer(steps, report))
        return [answer.report for answer in self._checked(answers)]

    def do_and_choose(
        self, steps: tuple[Callable[[], object], ...], report: Callable[[], Any], choose: Callable[[], Any]
    ) -> tuple[list[Any], Any]:
        """The same. In that meeting rank 0 calls `choose` if no rank has failed, and all ranks get what it returns."""

        def decide(answers: list[Any]) -> list[Any]:
            if any(answer.error is not None for answer in starmap(_Answer, answers)):
                return answers
            return [*answers, self._answer((), choose)]

        *answers, chosen = self._checked(self._world.decide(self._answer(steps, report), decide))
        return [answer.report for answer in answers], chosen.report

    def choose(self, choose: Callable[[], Any]) -> Any:
        """What rank 0 chooses, or its error, on all ranks."""
        answer = self._answer((), choose) if self._world.rank == 0 else None
        [chosen] = self._checked([self._world.broadcast(answer)])
        return chosen.report

    def _answer(self, steps: tuple[Callable[[], object], ...], report: Callable[[], Any]) -> _Answer:
        done = 0
        self._error = None
        try:
            for step in steps:
                step()
                done += 1
                self._world.beat()
            return _Answer(done, report())
        except RankLost:
            raise
        except CkptError as caught:
            error = caught
        except Exception as caught:
            # The other ranks must not wait for a rank that will never answer.
            error = RestoreFailed(f"rank {self._world.global_rank} cannot restore: {caught!r}")
            error.__cause__ = caught
        self._error = error
        return _Answer(done, None, (error.code, error.message, error.hint, list(error.chunks)))

    def _checked(self, answers: list[Any]) -> list[_Answer]:
        """The answers of all ranks, if none of them has failed."""
        parsed = list(starmap(_Answer, answers))
        failed = [(answer.steps, self._error_of(*answer.error)) for answer in parsed if answer.error is not None]
        if not failed:
            return parsed
        first = min(steps for steps, _ in failed)
        errors = [error for steps, error in failed if steps == first or isinstance(error, NoCheckpoint)]
        raise min(errors, key=_precedence)

    def _error_of(self, code: str, message: str, hint: str, chunks: Sequence[tuple[str, int]]) -> CkptError:
        error = error_from_code(code, message, hint)
        error.chunks = tuple((shard, index) for shard, index in chunks)
        own = self._error
        same = own is not None and (own.code, own.message, own.chunks) == (code, message, error.chunks)
        return own if own is not None and same else error


def _precedence(error: CkptError) -> int:
    """What a checkpoint that is being deleted lacks is not damage."""
    return 1 if isinstance(error, NoCheckpoint) else 2 if isinstance(error, TRY_NEXT) else 0
