"""Listings of checkpoints with filters and sort orders. Each page reads a bounded number of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from math import inf, isfinite
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, or_, select

from ckptd.index.database import Database, retried
from ckptd.index.states import read_checkpoint
from ckptd.index.tables import checkpoints
from ckptstore.commits.catalog import Checkpoint, State

MAX_ROWS = 5_000
"""Maximum number of rows read for one page; the cursor continues after them even if none matched."""
_BATCH = 500


class Sort(StrEnum):
    """Sort orders; a minus sign means descending."""

    RUN = "run"
    """By run, then newest generation and step first."""
    STEP = "step"
    STEP_FALLING = "-step"
    COMMITTED = "committed_at"
    COMMITTED_FALLING = "-committed_at"
    SIZE = "stored_bytes"
    SIZE_FALLING = "-stored_bytes"


@dataclass(frozen=True, slots=True)
class Bound:
    """A condition on a metric: it must exist and be within the limits, inclusive."""

    metric: str
    least: float = -inf
    most: float = inf

    def admits(self, checkpoint: Checkpoint) -> bool:
        """Whether the checkpoint's metric is a number within the limits."""
        value = checkpoint.metrics.get(self.metric, inf)
        return isfinite(value) and self.least <= value <= self.most


@dataclass(frozen=True, slots=True)
class Tagged:
    """A condition on a tag: it must exist, with this value unless that is None."""

    name: str
    value: str | None = None

    def admits(self, checkpoint: Checkpoint) -> bool:
        """Whether the checkpoint has the tag."""
        found = checkpoint.tags.get(self.name)
        return found is not None and self.value in (None, found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Conditions that must all hold. A condition that is left out always holds."""

    run: str | None = None
    """The name of a run, with the wildcards * and ?."""
    globs: tuple[str, ...] = ()
    """The run must match one of these patterns, if there are any."""
    states: frozenset[State] = frozenset()
    min_step: int | None = None
    max_step: int | None = None
    since: float | None = None
    until: float | None = None
    """Both limit the commit time, in seconds since the epoch."""
    bounds: tuple[Bound, ...] = ()
    tags: tuple[Tagged, ...] = ()

    @property
    def one_run(self) -> str | None:
        """The run, if the filter names exactly one."""
        return None if self.run is None or set("*?") & set(self.run) else self.run

    @property
    def exact(self) -> bool:
        """Whether the database evaluates all conditions."""
        return not (self.globs or self.bounds or self.tags) and self.run == self.one_run

    def admits(self, checkpoint: Checkpoint) -> bool:
        """Whether the conditions hold that the database does not evaluate, or only roughly."""
        named = self.run is None or fnmatchcase(checkpoint.run, self.run)
        allowed = not self.globs or any(fnmatchcase(checkpoint.run, glob) for glob in self.globs)
        wanted: tuple[Bound | Tagged, ...] = (*self.bounds, *self.tags)
        return named and allowed and all(condition.admits(checkpoint) for condition in wanted)


PageKey = tuple[Any, ...]
"""The values of a checkpoint in the sort columns."""


@dataclass(frozen=True, slots=True)
class Found:
    """One page."""

    checkpoints: list[Checkpoint]
    next: PageKey | None
    """The key after which the next page begins; None on the last page."""


class Listing:
    """Reads pages. Any thread may use it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @retried
    def page(self, wanted: Filter, sort: Sort, after: PageKey | None, limit: int) -> Found:
        """At most `limit` matching checkpoints after a page key."""
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


def key_types(sort: Sort) -> dict[str, type]:
    """The values of a page key, in order: name and type."""
    types: dict[str, type] = {"committed_at": float, "run": str, "ulid": str}
    return {name: types.get(name, int) for name, _ in _keys(sort)}


def _keys(sort: Sort) -> Sequence[tuple[str, bool]]:
    """Sort columns and whether they are descending. Together they identify a checkpoint."""
    rest = [("run", False), ("generation", True), ("step", True), ("committed_at", True), ("ulid", True)]
    if sort is Sort.RUN:
        return rest
    first = (sort.lstrip("-"), sort.startswith("-"))
    return [first, *(key for key in rest if key[0] != first[0])]


def _place(checkpoint: Checkpoint, sort: Sort) -> PageKey:
    attempt = checkpoint.attempt
    values = {"ulid": attempt.ulid, "step": attempt.step, "generation": attempt.generation}
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
        # A fixed run is left out of the order, so that the index can be searched by the next column.
        query = query.where(*_after([place for place in places if not (wanted.one_run and place[0] is c.run)]))
    return query.limit(limit)


def _after(keys: Sequence[tuple[ColumnElement[Any], bool, Any]]) -> Iterator[ColumnElement[bool]]:
    column, falling, value = keys[0]
    # Redundant, but it gives the database the start of the range.
    yield column <= value if falling else column >= value
    yield _is_after(keys)


def _is_after(keys: Sequence[tuple[ColumnElement[Any], bool, Any]]) -> ColumnElement[bool]:
    column, falling, value = keys[0]
    beyond = column < value if falling else column > value
    return beyond if len(keys) == 1 else or_(beyond, and_(column == value, _is_after(keys[1:])))


def _like(pattern: str) -> str:
    """A LIKE pattern that matches at least what the glob matches."""
    escaped = pattern.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return escaped.replace("*", "%").replace("?", "_")
