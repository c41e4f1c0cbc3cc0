"""What is news about a run, given what was known of it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from ckptapi.bodies import EventKind
from ckptd.index.events import News
from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.names import Attempt, checkpoint_id


def news_of(
    run: str, known: Mapping[Attempt, State], found: Collection[Checkpoint], gone: Collection[Attempt], since: float
) -> Iterator[News]:
    """News of checkpoints that were read or are gone. since: what was committed before it is none."""
    for checkpoint in sorted(found, key=lambda checkpoint: checkpoint.committed_at):
        before = known.get(checkpoint.attempt)
        if checkpoint.state is State.CORRUPT:
            if before is not State.CORRUPT:
                yield _news(EventKind.CORRUPT, run, checkpoint.attempt, problem=checkpoint.problem)
        elif before is None and checkpoint.committed_at >= since:
            yield _committed(checkpoint)
    for attempt in sorted(set(gone) & known.keys()):
        yield _news(EventKind.DELETED, run, attempt)


def _committed(checkpoint: Checkpoint) -> News:
    return _news(
        EventKind.COMMITTED,
        checkpoint.run,
        checkpoint.attempt,
        committed_at=checkpoint.committed_at,
        save_seconds=checkpoint.save_seconds,
        world_size=checkpoint.world_size,
        raw_bytes=checkpoint.raw_bytes,
        stored_bytes=checkpoint.stored_bytes,
        manifest_digest=checkpoint.manifest_digest,
        metrics=checkpoint.metrics,
    )


def _news(kind: EventKind, run: str, attempt: Attempt, **detail: object) -> News:
    detail = {"step": attempt.step, **detail}
    return News(kind=kind, run=run, checkpoint=checkpoint_id(run, attempt), detail=detail)
