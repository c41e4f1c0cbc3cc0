"""Layouts: the parts of a checkpoint that each rank of another world needs, without torch. Pure.

The layout is that of FSDP2: every entry is cut along its first dimension as `torch.chunk` does, so the last ranks may
have fewer rows or none. An entry without dimensions is needed by every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptstore.format.documents import Content
from ckptstore.format.overlaps import Want
from ckptstore.format.planning import ShardRead, plan_reads


@dataclass(frozen=True, slots=True)
class LayoutPlan:
    """The reads of a restore on `ranks` ranks. Bytes are stored bytes, with gaps between chunks."""

    ranks: int
    busiest_bytes: int
    """Read by the rank that reads most."""
    read_bytes: int
    """Read by all ranks. A chunk that several ranks need counts for each."""


def rows_of(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """The first row of a rank, and its number of rows, as `torch.chunk` cuts a dimension.

    Example: 10 rows on 4 ranks are cut into 3, 3, 3 and 1. On 6 ranks they are cut into five times 2, and the last rank
    has none.
    """
    step = -(-size // ranks)
    first = min(step * rank, size)
    return first, min(step, size - first)


def wants_of(content: Content, rank: int, ranks: int) -> list[Want]:
    """What one rank reads: its rows of every entry, each into a buffer with the name of the entry.

    Entries of which the rank has no row are omitted.
    """
    wants = []
    for name, shape in zip(content.entries.name, content.entries.shape, strict=True):
        if not shape:
            wants.append(Want(name, None, name))
            continue
        first, rows = rows_of(shape[0], rank, ranks)
        if rows:
            wants.append(Want(name, (first, *(0 for _ in shape[1:]), rows, *shape[1:]), name))
    return wants


def plan_rank(content: Content, rank: int, ranks: int) -> list[ShardRead]:
    """The reads of one rank. Raises CorruptObject unless the slices cover what it needs."""
    return plan_reads(content, wants_of(content, rank, ranks))


def plan_layout(content: Content, ranks: int) -> LayoutPlan:
    """Plan the restore of every rank. Raises CorruptObject unless the slices cover every entry."""
    read = [sum(one.bytes for one in plan_rank(content, rank, ranks)) for rank in range(ranks)]
    return LayoutPlan(ranks, max(read), sum(read))
