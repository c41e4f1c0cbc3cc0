"""The statistics of the tensors of a checkpoint, merged from those that each rank took of its slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import NamedTuple

import numpy as np

from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import CorruptObject, Damaged, InvalidRequest, ObjectMissing
from ckptstore.format.columns import column, concatenate
from ckptstore.format.documents import Content, Manifest
from ckptstore.format.parsing import parse_sealed
from ckptstore.format.statistics import COUNTS, Statistics, Table, is_counter, merge, side_document
from ckptstore.reading.source import Source, checked_statistics, read_manifest, statistics_name
from ckptstore.threads import in_parallel
from ckptstore.values import Record


class TensorStatistics(Record):
    """The statistics of one tensor. Both parts of a complex element count as elements."""

    name: str
    dtype: str
    shape: list[int]
    elements: int
    nan: int
    positive_inf: int
    negative_inf: int
    minimum: float | None
    """Least of the finite elements; null: there are none."""
    maximum: float | None
    is_finite: bool
    """Whether it has neither NaN nor Inf, or is a mask: nothing but zeros and -Inf."""

    @property
    def inf(self) -> int:
        """Number of infinite elements."""
        return self.positive_inf + self.negative_inf

    @property
    def largest(self) -> float:
        """The largest magnitude of a finite element; 0 if there is none."""
        return max(abs(self.minimum or 0.0), abs(self.maximum or 0.0))


class CheckpointStatistics(NamedTuple):
    """The statistics of a checkpoint."""

    checkpoint: Checkpoint
    tensors: Mapping[str, TensorStatistics]
    """By name, in the order of the manifest. Tensors with a slice of a missing rank are not among them."""
    missing: Sequence[str]
    """Why the statistics of some ranks are missing."""


def read_statistics(source: Source, checkpoint: Checkpoint) -> CheckpointStatistics:
    """Read and merge the statistics of all ranks. Raises InvalidRequest if the checkpoint was saved without them, and
    Damaged, ObjectMissing or Unavailable if its manifest cannot be read."""
    manifest = read_manifest(source, replace(checkpoint, thinned=False))  # they outlive optimizer state
    content = manifest.content
    missing: list[str] = []

    owner = column(shard.rank for shard in content.shards)[content.slices.shard]  # of each slice
    ranks = sorted({shard.rank for shard in content.shards})

    def read(rank: int) -> Table | None:
        try:
            return _read_rank(source, checkpoint, manifest, rank, int(np.count_nonzero(owner == rank)))
        except (Damaged, ObjectMissing) as error:
            missing.append(error.message)
            return None

    tables = in_parallel(read, ranks)
    rows = [np.flatnonzero(owner == rank) for rank in ranks]
    known = [(table, of) for table, of in zip(tables, rows, strict=True) if table is not None]
    if ranks and not known:
        if missing:
            raise CorruptObject(f"no statistics of {checkpoint.id} can be read: {missing[0]}", "Use another checkpoint")
        raise InvalidRequest(f"{checkpoint.id} was saved without statistics", "Save with statistics=True")
    entry = concatenate(content.slices.entry[of] for _, of in known)
    merged = merge([table for table, _ in known], entry, len(content.entries.name))
    left_out = {int(n) for t, of in zip(tables, rows, strict=True) if t is None for n in content.slices.entry[of]}
    return CheckpointStatistics(checkpoint, _tensors(content, merged, left_out), sorted(missing))


def _read_rank(source: Source, checkpoint: Checkpoint, manifest: Manifest, rank: int, slices: int) -> Table | None:
    """The statistics of a rank's slices, in the order of the manifest; None if there are none."""
    expected = side_document(manifest, rank)
    if expected is None:
        return None
    key = statistics_name(checkpoint, rank)
    document = parse_sealed(checked_statistics(source, checkpoint, rank, expected), Statistics, key)
    if (document.attempt, document.rank) != (str(checkpoint.attempt), rank):
        raise CorruptObject(f"{key} are those of another rank or attempt")
    table = document.table(key)
    if len(table.elements) != slices:
        raise CorruptObject(f"{key} have {len(table.elements)} rows, which does not fit the manifest")
    return table


def _tensors(content: Content, table: Table, left_out: set[int]) -> dict[str, TensorStatistics]:
    healthy = ~table.not_finite
    entries = content.entries
    return {
        name: TensorStatistics(
            name=name,
            dtype=entries.dtype[number],
            shape=entries.shape[number],
            **{count: int(getattr(table, count)[number]) for count in COUNTS},
            minimum=_number(table.minimum[number]),
            maximum=_number(table.maximum[number]),
            is_finite=bool(healthy[number] or is_counter(name, table.elements[number])),
        )
        for number, name in enumerate(entries.name)
        if number not in left_out
    }


def _number(value: float) -> float | None:
    return float(value) if isfinite(value) else None
