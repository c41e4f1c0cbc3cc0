"""Listings of checkpoints with filters and sort orders. Each page reads a bounded number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Select, and_, or_, select

from ckptapi.listing import Filter, Sort
from ckptd.index.checkpoints import read_checkpoint
from ckptd.index.database import Database, retried
from ckptd.index.tables import checkpoints
from ckptstore.commits.catalog import Checkpoint

MAX_ROWS = 5_000
"""Maximum number of rows read for one page; the cursor continues after them even if none matched."""
_BATCH = 500

PageKey = tuple[Any, ...]
"""The values of a checkpoint in the sort columns."""


class Found(NamedTuple):
    """One page."""

    checkpoints: list[Checkpoint]
    next: PageKey | None
    """The key after which the next page begins; None on the last page."""


@dataclass
class Listing:
    """Reads pages. Any thread may use it."""

    _database: Database

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
    return tuple(getattr(attempt if hasattr(attempt, name) else checkpoint, name) for name, _ in _keys(sort))


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
        # A fixed run is left out of the order, so that the index can be searched by the next column.
        values = zip(keys, after, strict=True)
        places = [(*key, value) for key, value in values if not (wanted.one_run and key[0] is c.run)]
        column, falling, value = places[0]
        # The range is redundant, but it gives the database its start.
        query = query.where(column <= value if falling else column >= value, _is_after(places))
    return query.limit(limit)


def _is_after(keys: Sequence[tuple[ColumnElement[Any], bool, Any]]) -> ColumnElement[bool]:
    column, falling, value = keys[0]
    beyond = column < value if falling else column > value
    return beyond if len(keys) == 1 else or_(beyond, and_(column == value, _is_after(keys[1:])))


def _like(pattern: str) -> str:
    """A LIKE pattern that matches at least what the glob matches."""
    escaped = pattern.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return escaped.replace("*", "%").replace("?", "_")
