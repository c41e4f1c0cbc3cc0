"""Restore drills: proof that a checkpoint restores on N ranks, and an estimate of how long that takes.

A drill plans the restore of every rank, restores a part at full speed into memory as a trainer would, and reads, checks
and decodes all other chunks once, at the rate of the scrub. It is a scrub as well: its finding is recorded as one, so a
checkpoint that fails is listed as corrupt. docs/decisions/0031 explains the estimate.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from ckptstore import names
from ckptstore.commits.catalog import Checkpoint, State, latest
from ckptstore.errors import CorruptObject, Damaged, InvalidName, NoCheckpoint, ObjectMissing
from ckptstore.format.documents import FORMAT, Content
from ckptstore.format.layouts import LayoutPlan, plan_layout, plan_rank, rows_of
from ckptstore.format.parsing import parse_sealed, seal
from ckptstore.format.planning import ShardRead, coalesce, entry_bytes
from ckptstore.format.records import Drill, DrilledLayout
from ckptstore.names import Attempt
from ckptstore.reading.fetch import Progress, check_decoded, fetch
from ckptstore.reading.source import StoreSource, read_local, read_manifest
from ckptstore.reading.verify import Verification, VerifiedChunks, verify
from ckptstore.retention.scrubbing import leased, record_finding
from ckptstore.run import Run

SAMPLE_BYTES = 256 << 20
"""Bytes that are read, and decoded bytes that are restored into memory, at full speed, at most."""
MAX_RANKS = 16_384
"""Largest number of ranks to plan for: each takes a millisecond or more."""
_ALIGN = 64
_LEAST_SHARE = 0.01
"""A sample with less than this share of the bytes that it could have shows no speed."""


@dataclass(frozen=True, slots=True)
class _Sample:
    """The restore of one rank at full speed."""

    open_s: float
    """Finding the checkpoint, protecting it, and reading and parsing its documents."""
    read_s: float
    """Reading, checking, decoding and placing."""
    reads: Sequence[ShardRead]

    @property
    def bytes(self) -> int:
        """Stored bytes, with gaps."""
        return sum(read.bytes for read in self.reads)

    def byte_s(self, stored_bytes: int) -> float | None:
        """Seconds per stored byte; None: the sampled rank needs almost nothing of a checkpoint of this size."""
        enough = _LEAST_SHARE * min(SAMPLE_BYTES, stored_bytes)
        return self.read_s / self.bytes if self.bytes and self.bytes >= enough else None


@dataclass(frozen=True, slots=True)
class _Timed:
    """The plan for a number of ranks."""

    plan: LayoutPlan
    rank_s: float
    """Time to plan one rank, on average."""

    @classmethod
    def of(cls, content: Content, ranks: int) -> _Timed:
        """Plan for all of them."""
        began = time.perf_counter()
        plan = plan_layout(content, ranks)
        return cls(plan, (time.perf_counter() - began) / ranks)


def drill(
    run: Run,
    checkpoint: Checkpoint,
    ranks: Iterable[int] = (),
    progress: Progress = lambda _: None,
    throttle: Progress = lambda _: None,
    checked: VerifiedChunks | None = None,
) -> Drill | None:
    """Drill a checkpoint and record the result; durable on return. None if it is being deleted.

    ranks: numbers of ranks to plan for, in addition to that of the checkpoint. progress, throttle, checked: as for a
    scrub. Raises Unavailable, which is no result; then nothing is recorded.
    """
    began = time.perf_counter()
    source = StoreSource(run.store, run.clock)
    known = replace(checkpoint, state=State.COMMITTED) if checkpoint.manifest_digest else checkpoint
    checked = checked or VerifiedChunks()
    _find_newest(run)
    with leased(run, checkpoint) as held:
        if held is None:
            return None
        found_s = time.perf_counter() - began
        sample, layouts, problem = _rehearse(source, known, sorted({*ranks, max(1, known.world_size)}))
        if sample is not None:
            checked.add_all(known, (chunk for read in sample.reads for chunk in read.chunks))
            throttle(sample.bytes)
        result = verify(
            source, known, progress, checked=checked, throttle=held.renewed_by(throttle), check=check_decoded
        )
        if result.ok and problem:
            result = replace(result, problems=(problem,))
        if held.was_deleted():
            return None
        record_finding(run, result)
    if sample is not None:
        sample = replace(sample, open_s=sample.open_s + found_s)
    done = _result(run, result, time.perf_counter() - began, sample, layouts if result.ok else [])
    _record(run, done)
    return done


def _find_newest(run: Run) -> None:
    """The lookup that a restore begins with; its duration counts."""
    with suppress(NoCheckpoint, Damaged):
        latest(run)


def _rehearse(
    source: StoreSource, checkpoint: Checkpoint, ranks: Sequence[int]
) -> tuple[_Sample | None, list[_Timed], str]:
    """A sample, the plans by number of ranks, and the problem. A failed restore is repeated once: a read may fail."""
    problem = ""
    for _ in range(2):
        try:
            sample, content = _restore_sample(source, checkpoint)
            return sample, [_Timed.of(content, number) for number in ranks], ""
        except (Damaged, ObjectMissing) as error:
            problem = str(error)
    return None, [], problem


def _restore_sample(source: StoreSource, checkpoint: Checkpoint) -> tuple[_Sample, Content]:
    """Restore the middle one of so many ranks that its part has SAMPLE_BYTES at most, apart from shared entries.

    That rank may need a few rows of every large chunk. So it reads only the first chunks, again SAMPLE_BYTES at most.
    """
    if checkpoint.state is State.CORRUPT:
        raise CorruptObject(checkpoint.problem)
    began = time.perf_counter()
    manifest = read_manifest(source, checkpoint)
    read_local(source, checkpoint, manifest, 0)
    opened = time.perf_counter()
    content = manifest.content
    shares = max(1, -(-sum(entry_bytes(content).values()) // SAMPLE_BYTES))
    reads = _first(plan_rank(content, shares // 2, shares))
    buffers = _buffers(content, shares // 2, shares)
    planned = time.perf_counter()
    fetch(source, checkpoint, reads, buffers)
    return _Sample(opened - began, time.perf_counter() - planned, reads), content


def _first(reads: Sequence[ShardRead]) -> list[ShardRead]:
    """The first chunks of these reads, SAMPLE_BYTES at most and at least one."""
    chunks = [chunk for read in reads for chunk in read.chunks]
    ends = accumulate(chunk.stored for chunk in chunks)
    return coalesce(
        [chunk for i, (chunk, end) in enumerate(zip(chunks, ends, strict=True)) if not i or end <= SAMPLE_BYTES]
    )


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


def _result(run: Run, result: Verification, drill_s: float, sample: _Sample | None, layouts: Sequence[_Timed]) -> Drill:
    byte_s = sample.byte_s(result.stored_bytes) if sample is not None else None
    return Drill(
        format=FORMAT, kind="drill", attempt=str(result.checkpoint.attempt), at=run.clock(), by=run.by, drill_s=drill_s,
        stored_bytes=result.stored_bytes,
        bytes_per_s=1 / byte_s if byte_s else 0.0,
        layouts=[_estimate(timed, sample.open_s, byte_s) for timed in layouts if sample is not None],
        problems=list(result.problems),
    )  # fmt: skip


def _estimate(timed: _Timed, open_s: float, byte_s: float | None) -> DrilledLayout:
    """The time of a restore by its longest rank: opening, planning, then reading at the speed of the sample."""
    plan, begin_s = timed.plan, open_s + timed.rank_s
    return DrilledLayout(
        ranks=plan.ranks,
        busiest_bytes=plan.busiest_bytes,
        read_bytes=plan.read_bytes,
        restore_s=None if byte_s is None else begin_s + plan.busiest_bytes * byte_s,
        shared_s=None if byte_s is None else begin_s + plan.read_bytes * byte_s,
    )


def _record(run: Run, done: Drill) -> None:
    """Keep the newest drill of a run; earlier ones are removed."""
    key = run.keys.drill(Attempt.parse(done.attempt))
    run.store.put(key, seal(done))
    run.store.delete_many([info.key for info in list(run.store.list(run.keys.drills)) if info.key != key])


def last_drill(run: Run) -> Drill | None:
    """The newest drill of a run; None if there was none, or its record is damaged. Raises Unavailable."""
    listed = sorted(run.store.list(run.keys.drills), key=lambda info: info.modified_at, reverse=True)
    for info in listed:
        try:
            names.attempt_and_name(info.key)
            return parse_sealed(run.store.get(info.key), Drill, run.store.object_url(info.key))
        except (Damaged, InvalidName, ObjectMissing):
            continue
    return None


def due_for_drill(run: Run, every_s: float, again_s: float) -> tuple[Checkpoint | None, Drill | None]:
    """The newest checkpoint of a run if it is due, and the last drill of the run.

    every_s: seconds between drills while the run goes on. again_s: seconds between drills of the same checkpoint.
    """
    last = last_drill(run)
    try:
        newest = latest(run)
    except NoCheckpoint:
        return None, last
    wait_s = again_s if last is not None and last.attempt == str(newest.attempt) else every_s
    # A time in the future is that of a wrong clock.
    due = last is None or bool(last.problems) or abs(run.clock() - last.at) >= wait_s
    return newest if due else None, last
