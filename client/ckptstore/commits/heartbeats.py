"""Heartbeats: what the store knows about the lives of a run's trainers.

A trainer without heartbeats is known by its generation and its checkpoints: when they were captured, and from which
checkpoint it continued.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from ckptstore import names
from ckptstore.commits.catalog import Checkpoint, list_checkpoints
from ckptstore.commits.generations import read_generations
from ckptstore.commits.goodput import Account, Beat, Life, account
from ckptstore.errors import Damaged, InvalidName, NoCheckpoint, ObjectMissing
from ckptstore.format.documents import Generation
from ckptstore.format.parsing import parse_sealed
from ckptstore.format.records import Ended, Heartbeat, near_only_of, origin_of
from ckptstore.names import Attempt
from ckptstore.run import Run

SILENT_S = 300.0
"""A trainer without a heartbeat for this time counts as gone."""
KEPT_S = 365 * 24 * 3600.0
MOST = 1000
"""Heartbeats of a run that are kept, the newest ones."""
_READERS = 16


def read_account(run: Run, checkpoints: Sequence[Checkpoint] | None = None) -> Account:
    """What became of the time of a run. Reads all heartbeats and generations.

    checkpoints: those of the run; None: read all outcomes. Raises NoCheckpoint if there are neither heartbeats nor
    checkpoints, UnsupportedFormat or Unavailable.
    """
    if checkpoints is None:
        checkpoints = list_checkpoints(run)
    heartbeats = read_heartbeats(run)
    lives = lives_of(heartbeats, read_generations(run).values(), checkpoints)
    if not lives:
        raise NoCheckpoint(
            f"run {run.name!r} has neither a heartbeat nor a checkpoint in {run.store.url}",
            "The first heartbeat comes a minute after training began",
        )
    # What another host still has to carry does not count: its generation is superseded.
    near_only = near_only_of(heartbeats[-1]) if heartbeats else None
    return msgspec.structs.replace(account(run.name, lives, run.clock(), SILENT_S), near_only=near_only)


def read_heartbeats(run: Run) -> list[Heartbeat]:
    """All heartbeats of a run, oldest first; damaged ones are left out. Raises UnsupportedFormat or Unavailable."""

    def read(key: str) -> Heartbeat | None:
        try:
            found = parse_sealed(run.store.get(key), Heartbeat, run.store.object_url(key))
            columns = {len(column) for column in (found.at, found.step, found.stalled_s, found.slowed_s)}
            if found.parent is not None:
                Attempt.parse(found.parent)
        except (Damaged, InvalidName, ObjectMissing):
            return None
        return found if found.run == run.name and len(columns) == 1 else None

    with ThreadPoolExecutor(_READERS) as pool:
        return [found for found in pool.map(read, sorted(_listed(run))) if found is not None]


def old_heartbeats(run: Run) -> list[str]:
    """The keys of heartbeats that may be deleted: older than a year, or more than MOST."""
    listed = sorted(_listed(run).items(), key=lambda item: item[1])
    surplus = len(listed) - MOST
    return [key for number, (key, at) in enumerate(listed) if number < surplus or run.age_s(at) > KEPT_S]


def lives_of(
    heartbeats: Iterable[Heartbeat], generations: Iterable[Generation | None], checkpoints: Iterable[Checkpoint]
) -> list[Life]:
    """The lives that left heartbeats, and those of generations that did not. Pure."""
    captures: dict[int, list[tuple[float, int]]] = {}
    for checkpoint in checkpoints:
        if checkpoint.created_at:
            captures.setdefault(checkpoint.attempt.generation, []).append((checkpoint.created_at, checkpoint.step))
    lives = [_of_heartbeat(heartbeat) for heartbeat in heartbeats]
    known = {life.generation for life in lives}
    documents = {one.number: one for one in generations if one is not None}
    for number in sorted((captures.keys() | documents.keys()) - known):
        life = _of_generation(number, documents.get(number), sorted(captures.get(number, ())))
        if life is not None:
            lives.append(life)
    return [
        life if life.generation is None else life.with_captures(captures.get(life.generation, ())) for life in lives
    ]


def _of_heartbeat(found: Heartbeat) -> Life:
    beats = zip(found.at, found.step, found.stalled_s, found.slowed_s, strict=True)
    return Life(
        id=found.id, began_at=found.began_at, trains_at=max(found.began_at, found.trains_at),
        restored_s=max(0.0, found.restored_s), generation=found.generation,
        parent=Attempt.parse(found.parent) if found.parent is not None else None,
        beats=sorted((Beat(*beat) for beat in beats), key=lambda beat: beat.at), ended=found.ended,
        ended_at=max(found.ended_at, found.began_at), origin=origin_of(found),
    )  # fmt: skip


def _of_generation(number: int, document: Generation | None, captures: Sequence[tuple[float, int]]) -> Life | None:
    """A life that is known by its generation. Its saves seem to cost nothing, and its end is its last capture."""
    if document is not None:
        began_at = names.ulid_time(document.session)
        captures = [capture for capture in captures if capture[0] >= began_at]
    elif captures:
        began_at = captures[0][0]
    else:
        return None
    ended_at = captures[-1][0] if captures else began_at
    return Life(
        id=document.session if document is not None else f"generation {number}", began_at=began_at, trains_at=began_at,
        restored_s=0.0, parent=Attempt.parse(document.parent) if document is not None and document.parent else None,
        generation=number, beats=[Beat(at, step) for at, step in captures], ended=Ended.NOT, ended_at=ended_at,
        measured=False, origin=origin_of(document) if document is not None else None,
    )  # fmt: skip


def _listed(run: Run) -> dict[str, float]:
    """When the heartbeats were written, by key."""
    found = {}
    for info in run.store.list(run.keys.heartbeats):
        try:
            names.check_ulid(info.key.rsplit("/", 1)[-1].removesuffix(".json"))
        except InvalidName:
            continue  # a foreign object
        found[info.key] = info.modified_at
    return found
