"""Listings of checkpoints by other orders, and of those that meet conditions. Reads a bounded number of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from math import inf, isfinite
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, or_, select

from ckptd.index.checkpoints import read_checkpoint
from ckptd.index.database import Database, retried
from ckptd.index.tables import checkpoints
from ckptstore.commits.catalog import Checkpoint, State

MAX_ROWS = 5_000
"""Looked at for one page; a cursor leads on from there, also where none of them met the conditions."""
_BATCH = 500


class Sort(StrEnum):
    """Orders of a listing; a minus sign: falling."""

    RUN = "run"
    """By run, then falling step."""
    STEP = "step"
    STEP_FALLING = "-step"
    COMMITTED = "committed_at"
    COMMITTED_FALLING = "-committed_at"
    SIZE = "stored_bytes"
    SIZE_FALLING = "-stored_bytes"


@dataclass(frozen=True, slots=True)
class Bound:
    """A metric that a checkpoint must have, and its limits, both included."""

    metric: str
    least: float = -inf
    most: float = inf

    def admits(self, checkpoint: Checkpoint) -> bool:
        """Whether the checkpoint's metric is a number within the limits."""
        value = checkpoint.metrics.get(self.metric, inf)
        return isfinite(value) and self.least <= value <= self.most


@dataclass(frozen=True, slots=True)
class Tagged:
    """A tag that a checkpoint must have, and its value; None: any."""

    name: str
    value: str | None = None

    def admits(self, checkpoint: Checkpoint) -> bool:
        """Whether the checkpoint is tagged so."""
        found = checkpoint.tags.get(self.name)
        return found is not None and self.value in (None, found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Conditions, all of which must hold; one that is left out holds."""

    run: str | None = None
    """A run's name, in which * and ? stand for any text and any character."""
    globs: tuple[str, ...] = ()
    """The run's name must match one of these; none: any."""
    states: frozenset[State] = frozenset()
    min_step: int | None = None
    max_step: int | None = None
    since: float | None = None
    until: float | None = None
    """Seconds since the epoch, of the commit."""
    bounds: tuple[Bound, ...] = ()
    tags: tuple[Tagged, ...] = ()

    @property
    def one_run(self) -> str | None:
        """The run, if only one can meet the conditions."""
        return None if self.run is None or set("*?") & set(self.run) else self.run

    @property
    def exact(self) -> bool:
        """The database looks at all conditions."""
        return not (self.globs or self.bounds or self.tags) and self.run == self.one_run

    def admits(self, checkpoint: Checkpoint) -> bool:
        """Whether the conditions hold that the database does not look at, or not exactly."""
        named = self.run is None or fnmatchcase(checkpoint.run, self.run)
        allowed = not self.globs or any(fnmatchcase(checkpoint.run, glob) for glob in self.globs)
        wanted: tuple[Bound | Tagged, ...] = (*self.bounds, *self.tags)
        return named and allowed and all(condition.admits(checkpoint) for condition in wanted)


PageKey = tuple[Any, ...]
"""What a checkpoint is sorted by."""


@dataclass(frozen=True, slots=True)
class Found:
    """One page."""

    checkpoints: list[Checkpoint]
    next: PageKey | None
    """Where the next one begins; None: there is none."""


class Listing:
    """Reads pages. Any thread may use it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @retried
    def page(self, wanted: Filter, sort: Sort, after: PageKey | None, limit: int) -> Found:
        """At most `limit` checkpoints that meet the conditions, after a place."""
        found: list[Checkpoint] = []
        rows = limit + 1 if wanted.exact else _BATCH
        with self._database.read() as connection:
            for _ in range(MAX_ROWS // _BATCH):
                batch = [read_checkpoint(row) for row in connection.execute(_query(wanted, sort, after, rows))]
                for checkpoint in batch:
                    if len(found) == limit:
                        return Found(found, after)
                    after = _place(checkpoint, sort)
                    if wanted.admits(checkpoint):
                        found.append(checkpoint)
                if len(batch) < rows:
                    return Found(found, None)
        return Found(found, after)


def types_of(sort: Sort) -> tuple[type, ...]:
    """Of the values of a place."""
    return tuple(
        float if name == "committed_at" else str if name in ("run", "ulid") else int for name, _ in _keys(sort)
    )


def _keys(sort: Sort) -> Sequence[tuple[str, bool]]:
    """Names of columns, and whether they fall. Together they tell any two checkpoints apart."""
    rest = [("run", False), ("step", True), ("committed_at", True), ("ulid", True)]
    if sort is Sort.RUN:
        return rest
    first = (sort.lstrip("-"), sort.startswith("-"))
    return [first, *(key for key in rest if key[0] != first[0])]


def _place(checkpoint: Checkpoint, sort: Sort) -> PageKey:
    values = {"ulid": checkpoint.attempt.ulid, "step": checkpoint.step}
    return tuple(values[name] if name in values else getattr(checkpoint, name) for name, _ in _keys(sort))


def _query(wanted: Filter, sort: Sort, after: PageKey | None, limit: int) -> Select[Any]:
    c = checkpoints.c
    keys = [(c[name], falling) for name, falling in _keys(sort)]
    query = select(checkpoints).order_by(*(column.desc() if falling else column for column, falling in keys))
    if wanted.run is not None:
        named = c.run == wanted.one_run if wanted.one_run else c.run.like(_like(wanted.run), escape="\\")
        query = query.where(named)
    if wanted.states:
        query = query.where(c.state.in_(sorted(wanted.states)))
    limits = ((c.step, wanted.min_step, wanted.max_step), (c.committed_at, wanted.since, wanted.until))
    for column, least, most in limits:
        if least is not None:
            query = query.where(column >= least)
        if most is not None:
            query = query.where(column <= most)
    if after is not None:
        places = [(*key, value) for key, value in zip(keys, after, strict=True)]
        # A run that is given is no part of the order, so that the next column can tell where to begin.
        query = query.where(*_after([place for place in places if not (wanted.one_run and place[0] is c.run)]))
    return query.limit(limit)


def _after(keys: Sequence[tuple[ColumnElement[Any], bool, Any]]) -> Iterator[ColumnElement[bool]]:
    column, falling, value = keys[0]
    # It follows from the other condition; it tells the database where to begin.
    yield column <= value if falling else column >= value
    yield _is_after(keys)


def _is_after(keys: Sequence[tuple[ColumnElement[Any], bool, Any]]) -> ColumnElement[bool]:
    column, falling, value = keys[0]
    beyond = column < value if falling else column > value
    return beyond if len(keys) == 1 else or_(beyond, and_(column == value, _is_after(keys[1:])))


def _like(pattern: str) -> str:
    """Admits at least what the pattern does."""
    escaped = pattern.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return escaped.replace("*", "%").replace("?", "_")
