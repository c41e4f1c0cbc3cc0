"""States of indexed checkpoints: which of a step counts, and which are of the live lineage of their run.

The rules are those of ckptstore.commits.catalog; here they are applied to rows that a change may affect.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, Row, and_, delete, func, insert, or_, select, update

from ckptd.index.tables import checkpoints, generations
from ckptstore.commits.catalog import Checkpoint, State, with_parents, with_states
from ckptstore.commits.generations import Lineage
from ckptstore.names import Attempt

NEWEST_FIRST = (
    checkpoints.c.run, *(checkpoints.c[name].desc() for name in ("generation", "step", "committed_at", "ulid"))
)  # fmt: skip
PLAIN_COLUMNS = (
    "run", "state", "committed_at", "created_at", "world_size", "raw_bytes", "stored_bytes", "referenced_bytes",
    "num_entries", "num_shards", "manifest_digest", "manifest_bytes", "problem", "abandoned_at",
    "not_finite",
)  # fmt: skip

Heads = list[tuple[int, bool]]
"""Generations with a checkpoint, newest first, up to the first of which one is readable; and whether one is."""


@dataclass(frozen=True, slots=True)
class BegunGeneration:
    """The document of a generation, as far as the index knows it."""

    number: int
    parent: str | None
    """The attempt from which it continues; None: none."""
    readable: bool
    """False: the document is damaged, and the parent unknown."""
    stamp: tuple[int, float] | None
    """Size and time in the listing before it was read; None if it was not listed."""


def generation_stamps(connection: Connection, run: str) -> dict[int, tuple[int, float] | None]:
    """The indexed generations of a run, with size and time of their documents in the listing."""
    c = generations.c
    rows = connection.execute(select(c.number, c.object_bytes, c.object_modified_at).where(c.run == run))
    return {number: (size, modified_at) if size is not None else None for number, size, modified_at in rows}


def write_generations(connection: Connection, run: str, begun: Sequence[BegunGeneration], lost: Sequence[int]) -> None:
    """Write generations to the index, and remove those whose document is lost."""
    for number in (*lost, *(one.number for one in begun)):
        connection.execute(delete(generations).where(generations.c.run == run, generations.c.number == number))
    rows = [
        {
            "run": run,
            "number": one.number,
            "parent": one.parent,
            "readable": one.readable,
            "object_bytes": one.stamp[0] if one.stamp else None,
            "object_modified_at": one.stamp[1] if one.stamp else None,
        }
        for one in begun
    ]
    if rows:
        connection.execute(insert(generations), rows)


def read_heads(connection: Connection, run: str) -> Heads:
    """The generations that decide what is live."""
    c = checkpoints.c
    readable = or_(c.state != State.CORRUPT, c.manifest_digest != "")
    certain = connection.scalar(select(func.max(c.generation)).where(c.run == run, readable))
    query = select(c.generation).distinct().where(c.run == run, c.generation >= (certain or 0))
    found = connection.scalars(query.order_by(c.generation.desc()))
    return [(generation, generation == certain) for generation in found]


def settle_states(connection: Connection, run: str, steps: Collection[int] | None) -> None:
    """Recompute which checkpoints are superseded or abandoned. steps: only of these; None: of the whole run."""
    if steps is not None and not steps:
        return
    c = checkpoints.c
    query = select(checkpoints).where(c.run == run)
    if steps is not None:
        query = query.where(c.step.between(min(steps), max(steps)))
    before = {found.attempt: found for found in map(read_checkpoint, connection.execute(query.order_by(*NEWEST_FIRST)))}
    parent_of = _readable_generations(connection, run).get
    lineage = Lineage(parent_of)
    for generation, readable in read_heads(connection, run):
        lineage.add(generation, readable)
    begun_at = {number: stamp[1] for number, stamp in generation_stamps(connection, run).items() if stamp}
    for after in with_parents(with_states(map(_as_read, before.values()), lineage, begun_at), parent_of):
        if (settled := _settled(after)) != _settled(before[after.attempt]):
            same = and_(c.run == run, c.step == after.step, c.ulid == after.attempt.ulid)
            connection.execute(update(checkpoints).where(same).values(settled))


def _settled(checkpoint: Checkpoint) -> dict[str, Any]:
    """The columns that depend on other rows."""
    parent = str(checkpoint.parent) if checkpoint.parent is not None else None
    return {"state": checkpoint.state, "abandoned_at": checkpoint.abandoned_at, "parent": parent}


def _readable_generations(connection: Connection, run: str) -> dict[int, BegunGeneration]:
    """The generations of a run whose parent is known, by number."""
    c = generations.c
    rows = connection.execute(select(c.number, c.parent).where(c.run == run, c.readable))
    return {number: BegunGeneration(number, parent, True, None) for number, parent in rows}


def _as_read(checkpoint: Checkpoint) -> Checkpoint:
    derived = checkpoint.state in (State.SUPERSEDED, State.ABANDONED)
    return replace(checkpoint, state=State.COMMITTED, abandoned_at=None) if derived else checkpoint


def attempt_of(row: Row[Any]) -> Attempt:
    """The attempt in a row."""
    return Attempt(row.step, row.ulid, generation=row.generation)


def read_checkpoint(row: Row[Any]) -> Checkpoint:
    """The checkpoint in a row of the table."""
    values: Mapping[str, Any] = {name: row._mapping[name] for name in PLAIN_COLUMNS}
    decoded = {
        "attempt": attempt_of(row),
        "state": State(row.state),
        "metrics": json.loads(row.metrics),
        "tags": json.loads(row.tags),
        "written_at": row.object_modified_at or 0.0,
        "parent": Attempt.parse(row.parent) if row.parent is not None else None,
    }
    return Checkpoint(**{**values, **decoded})
