"""Statistics of tensors: a table with a row per slice or entry, which rows merge into exactly, and its document. Pure.

Counts add up, and extremes combine. Means and root mean squares are weighted by the number of finite elements and
scaled before they are squared, so that neither many nor large elements overflow.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from ckptstore.codecs.dtypes import Numbers
from ckptstore.errors import CorruptObject
from ckptstore.format.columns import Column, column
from ckptstore.format.decoding import convert
from ckptstore.format.documents import FORMAT, JSON, Manifest, Outcome, Receipt, StoredDocument, digest
from ckptstore.names import Attempt

Flags = np.ndarray[Any, np.dtype[np.bool_]]

_EXTENSION = "statistics/{:05d}"
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
MOST_NAMED = 8
"""Entries that an extension names."""


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Statistics, a row per tensor or part of one."""

    elements: Column
    sampled: Column
    """The elements that `zeros`, `mean`, `rms` and the histogram are taken from; the other columns are of all."""
    nan: Column
    positive_inf: Column
    negative_inf: Column
    zeros: Numbers
    """Number of zeros, extrapolated from the sample."""
    minimum: Numbers
    maximum: Numbers
    """These, mean and rms describe the finite elements; NaN if there are none."""
    mean: Numbers
    rms: Numbers
    """Root mean square."""
    row: Column
    """The row of each bucket of the histograms, ascending."""
    exponent: Column
    """Its exponent field, as in the words of the type: ascending in each row."""
    count: Numbers
    """Number of elements with this exponent field, extrapolated from the sample."""

    @staticmethod
    def empty(rows: int) -> Table:
        """Rows without elements."""
        zeros, none = np.zeros(rows, np.int64), np.full(rows, np.nan)
        nothing = column()
        return Table(zeros, zeros, zeros, zeros, zeros, np.zeros(rows), none, none, none, none, nothing, nothing,
                     np.zeros(0))  # fmt: skip

    @property
    def inf(self) -> Column:
        """Number of infinite elements."""
        return self.positive_inf + self.negative_inf

    @property
    def finite(self) -> Column:
        """Number of finite elements."""
        return self.elements - self.nan - self.inf

    @property
    def not_finite(self) -> Flags:
        """The rows with NaN or Inf that are not masks: tensors that hold nothing but zeros and -Inf."""
        is_empty = self.finite == 0
        only_zeros = is_empty | ((self.minimum == 0) & (self.maximum == 0))
        is_mask = (self.nan == 0) & (self.positive_inf == 0) & only_zeros
        flags: Flags = ((self.nan > 0) | (self.inf > 0)) & ~is_mask
        return flags


def join(tables: list[Table]) -> Table:
    """The rows of all tables, one table after the other."""
    starts = np.cumsum([0, *(len(table.elements) for table in tables)])
    shifted = [table.row + start for table, start in zip(tables, starts[:-1].tolist(), strict=True)]
    joined = {
        field.name: np.concatenate([getattr(table, field.name) for table in tables])
        for field in fields(Table)
        if field.name != "row"
    }
    return Table(**joined, row=np.concatenate(shifted))


def merge(table: Table, group: Column, groups: int) -> Table:
    """The rows of each group merged into one row. group: of each row, below `groups`; -1: the row is left out."""
    order = np.argsort(group, kind="stable")
    order = order[np.searchsorted(group[order], 0) :]
    if not len(order):
        return Table.empty(groups)
    present, first = np.unique(group[order], return_index=True)

    def reduced(function: np.ufunc, values: np.ndarray[Any, Any], default: float) -> Any:
        found = np.full(groups, default, values.dtype)
        found[present] = function.reduceat(values[order], first)
        return found

    def total(values: np.ndarray[Any, Any]) -> Any:
        return reduced(np.add, values, 0)

    finite = table.finite
    weight = total(finite)
    largest = reduced(np.fmax, table.rms, np.nan)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.where(finite > 0, finite / weight[group], 0.0)
        scaled = np.where(largest[group] > 0, table.rms / largest[group], 0.0)
    mean = total(np.where(finite > 0, table.mean, 0.0) * share)
    square = total(np.where(finite > 0, scaled, 0.0) ** 2 * share)
    row, exponent, count = _merge_histograms(table, group)
    return Table(
        elements=total(table.elements),
        sampled=total(table.sampled),
        nan=total(table.nan),
        positive_inf=total(table.positive_inf),
        negative_inf=total(table.negative_inf),
        zeros=total(table.zeros),
        minimum=reduced(np.fmin, table.minimum, np.nan),
        maximum=reduced(np.fmax, table.maximum, np.nan),
        mean=np.where(weight > 0, mean, np.nan),
        rms=np.where(weight > 0, largest * np.sqrt(square), np.nan),
        row=row,
        exponent=exponent,
        count=count,
    )


_EXPONENTS = 1 << 11  # float64 has the most


def _merge_histograms(table: Table, group: Column) -> tuple[Column, Column, Numbers]:
    given = group[table.row] * _EXPONENTS + table.exponent
    keys, place = np.unique(given[given >= 0], return_inverse=True)
    count: Numbers = np.bincount(place, weights=table.count[given >= 0], minlength=len(keys)).astype(np.float64)
    return keys // _EXPONENTS, keys % _EXPONENTS, count


class Statistics(StoredDocument, frozen=True, eq=False):
    """The statistics of the slices in one receipt, as columns: row i is of slice i."""

    format: int
    kind: Literal["statistics"]
    attempt: str
    rank: int
    elements: Column
    sampled: Column
    nan: Column
    positive_inf: Column
    negative_inf: Column
    zeros: Column
    minimum: bytes
    """float64, little-endian, 8 bytes per row, like the next three."""
    maximum: bytes
    mean: bytes
    rms: bytes
    buckets: Column
    """Number of buckets of each row's histogram."""
    exponent: Column
    """The exponent fields of all buckets, row by row."""
    count: Column

    @staticmethod
    def of(attempt: Attempt, rank: int, table: Table) -> Statistics:
        """The document of a table."""
        return Statistics(
            format=FORMAT,
            kind="statistics",
            attempt=str(attempt),
            rank=rank,
            elements=table.elements,
            sampled=table.sampled,
            nan=table.nan,
            positive_inf=table.positive_inf,
            negative_inf=table.negative_inf,
            zeros=_whole(table.zeros),
            minimum=_pack(table.minimum),
            maximum=_pack(table.maximum),
            mean=_pack(table.mean),
            rms=_pack(table.rms),
            buckets=np.bincount(table.row, minlength=len(table.elements)),
            exponent=table.exponent,
            count=_whole(table.count),
        )

    def table(self, key: str) -> Table:
        """The table of a document that was read from `key`. Raises CorruptObject unless its columns fit together."""
        rows = len(self.elements)
        columns = (self.sampled, self.nan, self.positive_inf, self.negative_inf, self.zeros, self.buckets)
        numbers = (self.minimum, self.maximum, self.mean, self.rms)
        fits = all(len(one) == rows for one in columns) and all(len(one) == 8 * rows for one in numbers)
        # Added as numbers of Python, which do not overflow.
        buckets = sum(self.buckets.tolist())
        if not fits or not buckets == len(self.exponent) == len(self.count):
            raise CorruptObject(f"the columns of {key} do not fit together")
        if self.exponent.max(initial=0) >= _EXPONENTS:
            raise CorruptObject(f"{key} has an exponent field of {self.exponent.max()}")
        minimum, maximum, mean, rms = (np.frombuffer(one, "<f8").astype(np.float64) for one in numbers)
        return Table(
            self.elements, self.sampled, self.nan, self.positive_inf, self.negative_inf,
            self.zeros.astype(np.float64), minimum, maximum, mean, rms,
            np.repeat(np.arange(rows), self.buckets), self.exponent, self.count.astype(np.float64),
        )  # fmt: skip


def _whole(numbers: Numbers) -> Column:
    return np.rint(numbers).astype(np.int64)


def _pack(numbers: Numbers) -> bytes:
    return numbers.astype("<f8").tobytes()


class Health(msgspec.Struct, frozen=True):
    """How many elements of a checkpoint are NaN and Inf. Masks do not count."""

    nan: _Count
    inf: _Count
    entries: list[str]
    """The first entries with NaN or Inf, MOST_NAMED at most."""

    @property
    def is_healthy(self) -> bool:
        """Neither NaN nor Inf."""
        return not (self.nan or self.inf)


class SideDocument(msgspec.Struct, frozen=True, omit_defaults=True):
    """The extension of a receipt that names the document with the statistics of its slices."""

    digest: str
    bytes: _Count
    nan: _Count
    inf: _Count
    entries: list[str]
    offset: _Count | None = None
    """Where the document begins in the shard, behind the last chunk; None: it is an object of its own."""


HEALTH = "health"
"""The name of the extension of an outcome."""


def extension_name(rank: int) -> str:
    """The name of the extension of a receipt that names its statistics."""
    return _EXTENSION.format(rank)


def side_extension(rank: int, side: SideDocument) -> dict[str, JSON]:
    """The extension of a receipt that names its statistics."""
    return {extension_name(rank): msgspec.to_builtins(side)}


def side_document(document: Manifest | Receipt, rank: int) -> SideDocument | None:
    """What a manifest or receipt says about the statistics of a rank; None: nothing, or nothing that is valid."""
    try:
        return convert(document.extensions.get(extension_name(rank)), SideDocument)
    except msgspec.ValidationError:
        return None


def side_documents(manifest: Manifest) -> list[SideDocument | None]:
    """What a manifest says about the statistics of each of its shards."""
    return [side_document(manifest, shard.rank) for shard in manifest.content.shards]


def health_extension(manifest: Manifest) -> dict[str, JSON]:
    """The extension of an outcome about NaN and Inf; empty if they are not known."""
    sides = side_documents(manifest)
    known = [side for side in sides if side is not None]
    names = dict.fromkeys(name for side in known for name in side.entries)
    health = Health(sum(side.nan for side in known), sum(side.inf for side in known), list(names)[:MOST_NAMED])
    if health.is_healthy and (len(known) < len(sides) or not sides):
        return {}
    return {HEALTH: msgspec.to_builtins(health)}


def health_of(outcome: Outcome) -> Health | None:
    """What an outcome says about NaN and Inf; None: it is not known."""
    try:
        return convert(outcome.extensions.get(HEALTH), Health)
    except msgspec.ValidationError:
        return None


def warning_of(outcome: Outcome) -> str:
    """A warning of NaN and Inf in a checkpoint; empty without any."""
    health = health_of(outcome)
    if health is None or health.is_healthy:
        return ""
    return (
        f"the checkpoint of step {outcome.step} has {health.nan:,} NaN and {health.inf:,} Inf, first in "
        f"{', '.join(health.entries)}. It is committed; ckptctl why {outcome.run} shows more"
    )


def named_document(data: bytes, table: Table, names: list[str]) -> SideDocument:
    """What a receipt says about a stored document. names: the entry of each row."""
    rows = np.flatnonzero(table.not_finite)
    first = list(dict.fromkeys(names[row] for row in rows[: 16 * MOST_NAMED].tolist()))[:MOST_NAMED]
    return SideDocument(digest(data), len(data), int(table.nan[rows].sum()), int(table.inf[rows].sum()), first)
