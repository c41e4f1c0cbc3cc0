"""Statistics of tensors: exact extremes, and counts of NaN and Inf, as a table whose rows merge; its document. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from ckptstore.errors import CorruptObject
from ckptstore.format.columns import Column
from ckptstore.format.documents import FORMAT, JSON, Count, Manifest, Outcome, Receipt, StoredDocument, digest
from ckptstore.names import Attempt
from ckptstore.values import Value

Flags = np.ndarray[Any, np.dtype[np.bool_]]
Numbers = np.ndarray[Any, np.dtype[np.float64]]

MOST_NAMED = 8
"""Entries that an extension names."""
COUNTS = ("elements", "nan", "positive_inf", "negative_inf")
"""The columns of numbers of elements."""
_MERGED: dict[str, tuple[np.ufunc, float]] = {
    **dict.fromkeys(COUNTS, (np.add, 0)),
    "minimum": (np.fmin, np.nan),
    "maximum": (np.fmax, np.nan),
}
"""How the columns of rows are merged, and what they are without rows."""
_ROW = np.dtype([(name, type(none)) for name, (_, none) in _MERGED.items()])


class Table(NamedTuple):
    """Statistics, a row per tensor or part of one."""

    elements: Column
    nan: Column
    positive_inf: Column
    negative_inf: Column
    minimum: Numbers
    """Least of the finite elements; NaN if there are none."""
    maximum: Numbers

    @staticmethod
    def of(rows: Sequence[Sequence[float]]) -> Table:
        """The table of some rows."""
        found = np.array(rows, _ROW)
        return Table(**{name: found[name] for name in _MERGED})

    @property
    def inf(self) -> Column:
        """Number of infinite elements."""
        return self.positive_inf + self.negative_inf

    @property
    def not_finite(self) -> Flags:
        """The rows with NaN or Inf that are not masks: tensors that hold nothing but zeros and -Inf."""
        only_zeros = np.isnan(self.minimum) | ((self.minimum == 0) & (self.maximum == 0))
        is_mask = (self.nan == 0) & (self.positive_inf == 0) & only_zeros
        flags: Flags = ((self.nan > 0) | (self.inf > 0)) & ~is_mask
        return flags


def merge(tables: Sequence[Table], group: Column, groups: int) -> Table:
    """The rows of some tables, one table after the other, merged into one row per group. group: of each row."""
    columns: dict[str, Any] = {}
    for name, (function, none) in _MERGED.items():
        merged = np.full(groups, none)
        function.at(merged, group, np.concatenate([merged[:0], *(getattr(table, name) for table in tables)]))
        columns[name] = merged
    return Table(**columns)


class Statistics(StoredDocument, eq=False, forbid_unknown_fields=False):
    """The statistics of the slices in one receipt, as columns: row i is of slice i. Earlier writers added more."""

    kind: Literal["statistics"]
    attempt: str
    rank: int
    elements: Column
    nan: Column
    positive_inf: Column
    negative_inf: Column
    minimum: bytes
    """float64, little-endian, 8 bytes per row, like the next one."""
    maximum: bytes

    @staticmethod
    def of(attempt: Attempt, rank: int, table: Table) -> Statistics:
        """The document of a table."""
        minimum, maximum = ((one + 0.0).astype("<f8").tobytes() for one in (table.minimum, table.maximum))  # not -0.0
        counts = {name: getattr(table, name) for name in COUNTS}
        return Statistics(
            format=FORMAT, kind="statistics", attempt=str(attempt), rank=rank, **counts,
            minimum=minimum, maximum=maximum,
        )  # fmt: skip

    def table(self, key: str) -> Table:
        """The table of a document that was read from `key`. Raises CorruptObject unless its columns fit together."""
        counts = [getattr(self, name) for name in COUNTS]
        if len({*(8 * len(one) for one in counts), len(self.minimum), len(self.maximum)}) > 1:
            raise CorruptObject(f"the columns of {key} do not fit together")
        return Table(*counts, *(np.frombuffer(one, "<f8").astype(np.float64) for one in (self.minimum, self.maximum)))


class Health(Value):
    """How many elements of a checkpoint are NaN and Inf. Masks do not count."""

    nan: Count
    inf: Count
    entries: list[str]
    """The first entries with NaN or Inf, MOST_NAMED at most."""

    @property
    def is_healthy(self) -> bool:
        """Neither NaN nor Inf."""
        return not (self.nan or self.inf)


class SideDocument(Value, omit_defaults=True):
    """The extension of a receipt that names the document with the statistics of its slices."""

    digest: str
    bytes: Count
    nan: Count
    inf: Count
    entries: list[str]
    offset: Count | None = None
    """Where the document begins in the shard, behind the last chunk; None: it is an object of its own."""


HEALTH = "health"
"""The name of the extension of an outcome."""


def extension_name(rank: int) -> str:
    """The name of the extension of a receipt that names its statistics."""
    return f"statistics/{rank:05d}"


def side_extension(rank: int, side: SideDocument) -> dict[str, JSON]:
    """The extension of a receipt that names its statistics."""
    return {extension_name(rank): msgspec.to_builtins(side)}


def side_document(document: Manifest | Receipt, rank: int) -> SideDocument | None:
    """The record of a rank's statistics in a manifest or receipt; None: none, or none that is valid."""
    return document.extension(extension_name(rank), SideDocument)


def side_documents(manifest: Manifest) -> list[SideDocument | None]:
    """The record of the statistics of each shard in a manifest; None for the second one of a rank, which has none."""
    first: dict[int, str] = {}
    shards = [(shard.rank, first.setdefault(shard.rank, shard.name) == shard.name) for shard in manifest.content.shards]
    return [side_document(manifest, rank) if is_first else None for rank, is_first in shards]


def health_extension(manifest: Manifest) -> dict[str, JSON]:
    """The extension of an outcome about NaN and Inf; empty if they are not known."""
    sides = side_documents(manifest)
    known = [side for side in sides if side is not None]
    names = dict.fromkeys(name for side in known for name in side.entries)
    health = Health(sum(side.nan for side in known), sum(side.inf for side in known), list(names)[:MOST_NAMED])
    if health.is_healthy and (len(known) < len({shard.rank for shard in manifest.content.shards}) or not sides):
        return {}
    return {HEALTH: msgspec.to_builtins(health)}


def warning_of(outcome: Outcome) -> str:
    """A warning of NaN and Inf in a checkpoint; empty without any."""
    health = outcome.extension(HEALTH, Health)
    if health is None or health.is_healthy:
        return ""
    return (
        f"the checkpoint of step {outcome.step} has {health.nan:,} NaN and {health.inf:,} Inf, first in "
        f"{', '.join(health.entries)}. It is committed; ckptctl why {outcome.run} shows more"
    )


def is_counter(name: str, elements: int) -> bool:
    """Whether an entry is a number of a training framework, such as the best score so far, which may begin as Inf."""
    return elements == 1 and name.startswith("trainer/")


def named_document(data: bytes, table: Table, names: list[str]) -> SideDocument:
    """The record of a stored document in a receipt. names: the entry of each row."""
    flagged = np.flatnonzero(table.not_finite).tolist()
    rows = [row for row in flagged if not is_counter(names[row], table.elements[row])]
    first = list(dict.fromkeys(names[row] for row in rows[: 16 * MOST_NAMED]))[:MOST_NAMED]
    return SideDocument(digest(data), len(data), int(table.nan[rows].sum()), int(table.inf[rows].sum()), first)
