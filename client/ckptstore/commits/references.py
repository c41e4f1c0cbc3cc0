"""Which checkpoints hold chunks that others reference: one small object per pair, so that a listing is enough.

A committer writes these objects, then looks for tombstones of what it references, and only then commits; they go when
the data of the referencing attempt has gone. So a referenced checkpoint is held exactly as a pinned one is, by whoever
may still come to use it: also by one that is hidden, and by one whose committer died (docs/decisions/0018).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from ckptstore import names
from ckptstore.errors import InvalidName, ReferenceLost
from ckptstore.format.documents import FORMAT, Content
from ckptstore.format.parsing import seal
from ckptstore.format.records import ReferenceMark
from ckptstore.names import Attempt
from ckptstore.run import Run

_NAMED = 3
"""Referencing checkpoints that are named; there may be thousands."""


@dataclass(frozen=True, slots=True)
class Mark:
    """That `by` references chunks of `attempt`."""

    attempt: Attempt
    by: Attempt


def referenced_attempts(content: Content) -> list[Attempt]:
    """Whose chunks a checkpoint needs besides its own, by rising step. Pure."""
    found = {attempt for shard in content.shards if shard.references for attempt in shard.references.attempts}
    return sorted(map(Attempt.parse, found))


def mark(run: Run, by: Attempt, attempts: Collection[Attempt]) -> None:
    """Hold what an attempt references, before it is committed; durable on return.

    Raises ReferenceLost if one of them is being deleted: then the attempt must not be committed. The marks stay all the
    same, because somebody else may have committed the attempt meanwhile; collection removes them.
    """
    for attempt in attempts:
        document = ReferenceMark(format=FORMAT, kind="reference", attempt=str(attempt), by=str(by), at=run.clock())
        run.store.put(run.keys.reference(attempt, by), seal(document))
    hidden = {attempt for attempt, _ in _parsed(info.key for info in run.store.list(run.keys.tombstones))}
    for attempt in attempts:
        if attempt in hidden:
            raise lost(run, by, attempt)


def lost(run: Run, by: Attempt, attempt: Attempt) -> ReferenceLost:
    """The error for an attempt that cannot be committed any more."""
    return ReferenceLost(
        f"{run.id_of(by)} references chunks of {run.id_of(attempt)}, which is deleted",
        "Save again: what cannot be referenced is stored",
    )


def marks(run: Run) -> list[Mark]:
    """All of a run."""
    found = []
    for attempt, name in _parsed(info.key for info in run.store.list(run.keys.references)):
        try:
            found.append(Mark(attempt, Attempt.parse(name)))
        except InvalidName:
            continue  # not ours
    return found


def unmark(run: Run, listed: Iterable[Mark]) -> None:
    """Remove marks of attempts whose data has gone, for good: nobody can commit them any more."""
    run.store.delete_many([run.keys.reference(found.attempt, found.by) for found in listed])


def reasons(run: Run) -> dict[Attempt, list[str]]:
    """Why attempts must stay: `referenced:ID`, for the newest few of those that reference them."""
    by: dict[Attempt, list[Attempt]] = defaultdict(list)
    for found in marks(run):
        by[found.attempt].append(found.by)
    return {attempt: list(_reasons(run, sorted(others, reverse=True))) for attempt, others in by.items()}


def _reasons(run: Run, by: list[Attempt]) -> Iterator[str]:
    yield from (f"referenced:{run.id_of(attempt)}" for attempt in by[:_NAMED])
    if len(by) > _NAMED:
        yield f"referenced:{len(by) - _NAMED} more"


def _parsed(keys: Iterable[str]) -> Iterator[tuple[Attempt, str]]:
    for key in keys:
        try:
            yield names.attempt_and_name(key)
        except InvalidName:
            continue  # not ours
