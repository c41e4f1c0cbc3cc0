"""Marks: which checkpoints reference chunks of others. One small object per pair, so that a listing is enough.

A committer writes the marks, then looks whether the referenced attempts are committed and not hidden, and only then
commits. Marks are removed after the data of the referencing attempt. Until then they keep the data of a checkpoint as a
pin does, even if the referencing attempt is hidden or its committer died (docs/decisions/0018). A checkpoint that only
hidden ones reference may be hidden, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Container, Iterable
from typing import NamedTuple

from ckptstore.errors import InvalidName, ReferenceLost
from ckptstore.format.documents import FORMAT, Content
from ckptstore.format.records import ReferenceMark
from ckptstore.names import Attempt, is_optimizer_shard
from ckptstore.run import Run

REFERENCED = "referenced:"
"""Begins reasons that hold a checkpoint from deletion, and not its optimizer state."""
_OPTIMIZER = ".optimizer"
_NAMED = 3
"""Number of referencing checkpoints that a reason names; there may be thousands."""


class Mark(NamedTuple):
    """Attempt `by` references chunks of `attempt`."""

    attempt: Attempt
    by: Attempt
    optimizer: bool = False
    """About optimizer state. There is another mark without this."""


def referenced_attempts(content: Content, optimizer: bool = False) -> list[Attempt]:
    """The other attempts whose chunks a checkpoint needs, oldest step first; optimizer: of optimizer state. Pure."""
    shards = (shard for shard in content.shards if not optimizer or is_optimizer_shard(shard.name))
    return sorted(map(Attempt.parse, {attempt for shard in shards for attempt in shard.needed}))


def mark(run: Run, by: Attempt, attempts: Collection[Attempt], optimizer: Collection[Attempt] = ()) -> None:
    """Protect the attempts that `by` references, before it is committed; durable on return.

    The caller then checks that they are not being deleted. If one is, the attempt must not be committed. The marks stay
    in that case, because another process may have committed the attempt already; a collection removes them. optimizer:
    those whose optimizer state it references.
    """
    for needed, of_optimizer in ((attempts, False), (optimizer, True)):
        for attempt in needed:
            document = ReferenceMark(format=FORMAT, kind="reference", attempt=str(attempt), by=str(by), at=run.clock())
            run.write(run.keys.reference(attempt, by, of_optimizer), document)


def reference_lost(run: Run, by: Attempt, attempt: Attempt) -> ReferenceLost:
    """The error for an attempt that can no longer be committed."""
    return ReferenceLost(
        f"{run.id_of(by)} references chunks of {run.id_of(attempt)}, which is deleted",
        "Save again: the new attempt stores these chunks itself",
    )


def marks(run: Run) -> list[Mark]:
    """All marks of a run."""
    found = []
    for attempt, name, _ in run.listed(run.keys.references):
        by = name.removesuffix(_OPTIMIZER)
        try:
            found.append(Mark(attempt, Attempt.parse(by), by != name))
        except InvalidName:
            continue  # a foreign object
    return found


def unmark(run: Run, listed: Iterable[Mark]) -> None:
    """Remove marks of attempts whose data is deleted: they can no longer be committed."""
    run.store.delete_many([run.keys.reference(*found) for found in listed])


def reasons(run: Run, hidden: Container[Attempt] = ()) -> dict[Attempt, list[str]]:
    """Why attempts must stay: `referenced:ID` for the newest few referencing attempts, and a count of the others.
    `optimizer:ID` says the same about their optimizer state.

    hidden: attempts whose references do not count, because they are hidden.
    """
    by: dict[tuple[Attempt, str], list[Attempt]] = defaultdict(list)
    for found in marks(run):
        if found.by not in hidden:
            by[found.attempt, "optimizer:" if found.optimizer else REFERENCED].append(found.by)
    why: dict[Attempt, list[str]] = defaultdict(list)
    for (attempt, kind), others in by.items():
        why[attempt] += [f"{kind}{run.id_of(other)}" for other in sorted(others, reverse=True)[:_NAMED]]
        if len(others) > _NAMED:
            why[attempt].append(f"{kind}{len(others) - _NAMED} more")
    return dict(why)
