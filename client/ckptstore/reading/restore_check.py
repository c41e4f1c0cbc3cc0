"""Check of a restore: proof that a checkpoint restores on N ranks, and an estimate of how long that takes.

It plans the restore of every rank, without torch, and restores a part at full speed into memory as a trainer would.
Every entry is cut along its first dimension as `torch.chunk` and FSDP2 do, so the last ranks may have fewer rows or
none. docs/decisions/0031 explains the estimate.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import Damaged, NoCheckpoint, ObjectMissing
from ckptstore.format.boxes import Want
from ckptstore.format.documents import Content
from ckptstore.format.planning import ShardRead, batches, chunks_of, coalesce, entry_bytes, plan_reads
from ckptstore.reading.fetch import fetch
from ckptstore.reading.source import Source, read_local, read_manifest
from ckptstore.values import Value

SAMPLE_BYTES = 256 << 20
"""Bytes that are read, and decoded bytes that are restored into memory, at full speed, at most."""
MAX_RANKS = 16_384
"""Largest number of ranks to plan for: each takes a millisecond or more."""
_ALIGN = 64
_LEAST_SHARE = 0.01
"""A sample with less than this share of the bytes that it could have shows no speed."""


class RestoreEstimate(Value):
    """How long a restore takes on a number of ranks. Bytes are stored bytes."""

    ranks: int
    busiest_bytes: int
    """Read by the rank that reads most."""
    read_bytes: int
    """Read by all ranks."""
    restore_s: float | None
    """If each rank reads as fast as the sample was read; None: not known, because the sample was empty."""
    shared_s: float | None
    """If all ranks together read as fast as the sample was read: on one host, or at the limit of the store."""


class RestoreCheck(NamedTuple):
    """The restore of the part of one rank, and an estimate for each number of ranks; none if it does not restore."""

    reads: Sequence[ShardRead] = ()
    estimates: tuple[RestoreEstimate, ...] = ()
    problem: str = ""


def check_restore(source: Source, checkpoint: Checkpoint, ranks: Iterable[int]) -> RestoreCheck:
    """Restore the sample and plan for these numbers of ranks and the one that saved. Raises Unavailable.

    A failed restore is repeated once: a read may fail.
    """
    problem = ""
    for _ in range(2):
        try:
            return _check_restore(source, checkpoint, sorted({*ranks, max(1, checkpoint.world_size)}))
        except (Damaged, ObjectMissing) as error:
            problem = str(error)
    return RestoreCheck(problem=problem)


def _check_restore(source: Source, checkpoint: Checkpoint, ranks: Sequence[int]) -> RestoreCheck:
    """Restore the middle one of so many ranks that its part has SAMPLE_BYTES at most, apart from shared entries.

    That rank may need a few rows of every large chunk. So it reads only the first chunks, again SAMPLE_BYTES at most.
    """
    began = time.perf_counter()
    with suppress(NoCheckpoint, Damaged):
        source.latest(checkpoint.run)  # a restore begins with this lookup
    manifest = read_manifest(source, checkpoint)
    read_local(source, checkpoint, manifest, 0)
    open_s = time.perf_counter() - began
    content = manifest.content
    shares = max(1, -(-sum(entry_bytes(content).values()) // SAMPLE_BYTES))
    reads = _first(plan_rank(content, shares // 2, shares))
    buffers = _buffers(content, shares // 2, shares)
    began = time.perf_counter()
    fetch(source, checkpoint, reads, buffers)
    read_s, read_bytes = time.perf_counter() - began, _read_bytes(reads)
    enough = max(1, _LEAST_SHARE * min(SAMPLE_BYTES, checkpoint.needed_bytes))
    byte_s = read_s / read_bytes if read_bytes >= enough else None
    return RestoreCheck(reads, tuple(_estimate(content, number, open_s, byte_s) for number in ranks))


def _estimate(content: Content, ranks: int, open_s: float, byte_s: float | None) -> RestoreEstimate:
    """The time of a restore by its longest rank: opening, planning, then reading at the speed of the sample."""
    began = time.perf_counter()
    needed = rank_bytes(content, ranks)
    begin_s = open_s + (time.perf_counter() - began) / ranks
    return RestoreEstimate(
        ranks=ranks,
        busiest_bytes=max(needed),
        read_bytes=sum(needed),
        restore_s=None if byte_s is None else begin_s + max(needed) * byte_s,
        shared_s=None if byte_s is None else begin_s + sum(needed) * byte_s,
    )


def rank_bytes(content: Content, ranks: int) -> list[int]:
    """Stored bytes that each rank reads, with gaps. Raises CorruptObject unless the slices cover every entry. Pure."""
    return [_read_bytes(plan_rank(content, rank, ranks)) for rank in range(ranks)]


def _read_bytes(reads: Sequence[ShardRead]) -> int:
    return sum(read.bytes + sum(base.stored for chunk in read.chunks for base in chunk.bases) for read in reads)


def rows_of(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """The first row of a rank, and its number of rows, as `torch.chunk` cuts a dimension.

    Example: 10 rows on 4 ranks are cut into 3, 3, 3 and 1. On 6 ranks they are cut into five times 2, and the last rank
    has none.
    """
    step = -(-size // ranks)
    first = min(step * rank, size)
    return first, min(step, size - first)


def wants_of(content: Content, rank: int, ranks: int) -> Iterator[Want]:
    """The reads of one rank: its rows of every entry, each into a buffer with the name of the entry.

    Entries of which the rank has no row are omitted.
    """
    for name, _, shape in content.entries.rows():
        if not shape:
            yield Want(name, None, name)
            continue
        first, rows = rows_of(shape[0], rank, ranks)
        if rows:
            yield Want(name, (first, *(0 for _ in shape[1:]), rows, *shape[1:]), name)


def plan_rank(content: Content, rank: int, ranks: int) -> list[ShardRead]:
    """The reads of one rank. Raises CorruptObject unless the slices cover what it needs."""
    return plan_reads(content, wants_of(content, rank, ranks))


def _first(reads: Sequence[ShardRead]) -> list[ShardRead]:
    """The first chunks of these reads, SAMPLE_BYTES at most and at least one."""
    return coalesce(next(batches(chunks_of(reads), lambda chunk: chunk.stored, SAMPLE_BYTES), ()))


def _buffers(content: Content, rank: int, ranks: int) -> dict[str, memoryview]:
    """Memory for the part of a rank, as torch allocates it: without the huge pages that numpy requests."""
    sizes = {}
    for (name, size), shape in zip(entry_bytes(content).items(), content.entries.shape, strict=True):
        sizes[name] = size // shape[0] * rows_of(shape[0], rank, ranks)[1] if shape and shape[0] else size
    ends = list(accumulate(-(-size // _ALIGN) * _ALIGN for size in sizes.values()))
    memory = memoryview(mmap.mmap(-1, max(1, ends[-1] if ends else 0)))
    # Touched: a trainer restores into memory that is there.
    np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 1
    starts = [0, *ends]
    return {name: memory[start : start + size] for (name, size), start in zip(sizes.items(), starts, strict=False)}
