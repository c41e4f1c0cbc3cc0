"""Importing: stores the state in a file as one committed checkpoint, chunk by chunk."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from ckpt.foreign.parts import ForeignState, Read
from ckpt.saver.upload import Uploaded, upload_shard
from ckptstore import names
from ckptstore.clock import Clock
from ckptstore.commits.catalog import Checkpoint, find, from_outcome
from ckptstore.commits.commit import StoredReceipt, commit_attempt
from ckptstore.errors import InvalidRequest, NoCheckpoint
from ckptstore.format.boxes import Box
from ckptstore.format.codings import fast
from ckptstore.format.documents import FORMAT, Content, Receipt, Shard
from ckptstore.format.parsing import seal
from ckptstore.format.planning import check_cover
from ckptstore.format.shards import (
    ChunkSpan,
    EncodedChunk,
    Placed,
    encode_chunk,
    place_slices,
    plan_chunks,
    raw_bytes,
    slice_tables,
)
from ckptstore.names import Attempt, Reference, new_ulid
from ckptstore.reading.fetch import Progress
from ckptstore.run import Run
from ckptstore.stores import Store

_THREADS = min(4, max(1, os.cpu_count() or 1))
_AHEAD = 2  # encoded chunks that wait, in addition to one per thread


def new_attempt(store: Store, reference: str, clock: Clock) -> tuple[str, Attempt]:
    """The run and a new attempt of the step in RUN@STEP. Raises InvalidRequest if the step has a checkpoint."""
    wanted = Reference.parse(reference)
    if wanted.step is None or wanted.ulid is not None:
        raise InvalidRequest(f"{reference!r} does not name a new checkpoint", "Use RUN@STEP")
    try:
        found = find(store, wanted)
    except NoCheckpoint:
        return wanted.run, Attempt(wanted.step, new_ulid(clock()))
    raise InvalidRequest(
        f"{found.id} exists", "Choose another run or step; committed checkpoints are never overwritten"
    )


def write_checkpoint(run: Run, attempt: Attempt, foreign: ForeignState, progress: Progress) -> Checkpoint:
    """Store the state as the checkpoint of a single process; it exists on return.

    Memory does not grow with the state. Raises CorruptObject if the file is damaged; then nothing is committed.
    Raises Unavailable if the store fails.
    """
    created_at = run.clock()
    placed = place_slices(part.slice for part in foreign.parts)
    entries, slices = slice_tables(placed)
    trees, aliases = foreign.trees, foreign.aliases
    check_cover(Content(shards=[], entries=entries, slices=slices, aliases=aliases, trees=trees))
    uploaded = _upload(run, attempt, placed, foreign, progress) if placed else None
    shards = [Shard(name=names.shard_name(0), rank=0, chunks=uploaded.chunks)] if uploaded else []
    receipt = Receipt(
        format=FORMAT,
        kind="receipt",
        run=run.name,
        step=attempt.step,
        attempt=str(attempt),
        rank=0,
        world_size=1,
        created_at=created_at,
        content=Content(shards=shards, entries=entries, slices=slices, aliases=aliases, trees=trees),
        local={},
        metrics={},
    )
    data = seal(receipt)
    run.store.put(run.keys.receipt(attempt, 0), data)
    checkpoint = from_outcome(commit_attempt(run, [StoredReceipt(receipt, data)]))
    assert checkpoint is not None  # an aborted attempt is an error of commit_attempt
    return checkpoint


def _upload(
    run: Run, attempt: Attempt, placed: Sequence[Placed], foreign: ForeignState, progress: Progress
) -> Uploaded:
    reads = {(part.slice.entry, part.slice.box): part.read for part in foreign.parts}
    key = run.keys.shard(attempt, names.shard_name(0))
    done = 0

    def report(total: int) -> None:
        nonlocal done
        progress(total - done)
        done = total

    return upload_shard(run.store, key, raw_bytes(placed), _encode(placed, reads), report)


def _encode(placed: Sequence[Placed], reads: Mapping[tuple[str, Box], Read]) -> Iterator[EncodedChunk]:
    """The encoded chunks in order, with only a few of them in memory."""
    starts = [place.at for place in placed]

    def encode(span: ChunkSpan) -> EncodedChunk:
        raw = memoryview(bytearray(span.bytes))
        for place in placed[bisect_right(starts, span.at) - 1 :]:
            low, high = max(span.at, place.at), min(span.at + span.bytes, place.at + place.slice.bytes)
            if place.at >= span.at + span.bytes:
                break
            if low < high:
                read = reads[place.slice.entry, place.slice.box]
                read(low - place.at, raw[low - span.at : high - span.at])
        return encode_chunk(raw, fast(span.dtype))

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="ckpt-import") as pool:
        waiting: deque[Future[EncodedChunk]] = deque()
        try:
            for span in plan_chunks(placed):
                if len(waiting) >= _THREADS + _AHEAD:
                    yield waiting.popleft().result()
                waiting.append(pool.submit(encode, span))
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
