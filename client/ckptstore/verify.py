"""Checking one checkpoint on demand: every document and every chunk, against the checksum above it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ckptstore.catalog import Checkpoint, State
from ckptstore.errors import Damaged, ObjectMissing
from ckptstore.format.planning import ChunkRead, ShardRead, check_cover, plan_all
from ckptstore.reading import DEFAULT_THREADS, Progress, check_chunk, fetch_stored
from ckptstore.source import Source, read_manifest, read_receipt


@dataclass(frozen=True, slots=True)
class Verification:
    """What a check found. `problems` is empty if every byte is as it was written."""

    checkpoint: Checkpoint
    num_chunks: int
    stored_bytes: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """No problem was found."""
        return not self.problems


def verify(
    source: Source,
    checkpoint: Checkpoint,
    progress: Progress = lambda _: None,
    threads: int = DEFAULT_THREADS,
) -> Verification:
    """Read and check everything a checkpoint consists of; goes on after a problem, to report all.

    progress is called with stored bytes. Raises Unavailable if the store cannot answer: that proves nothing.
    """
    if checkpoint.state is State.CORRUPT:
        return Verification(checkpoint, 0, 0, (checkpoint.problem,))
    try:
        manifest = read_manifest(source, checkpoint)
        check_cover(manifest.content)
    except (Damaged, ObjectMissing) as error:
        return Verification(checkpoint, 0, 0, (str(error),))
    problems: list[str] = []
    lock = threading.Lock()

    def note(error: Exception) -> None:
        with lock:
            problems.append(str(error))

    def check(read: ChunkRead) -> None:
        try:
            check_chunk(checkpoint, read, fetch_stored(source, checkpoint, ShardRead((read,))))
        except (Damaged, ObjectMissing) as error:
            note(error)
        progress(read.stored)

    for rank in range(manifest.world_size):
        try:
            read_receipt(source, checkpoint, manifest, rank)
        except (Damaged, ObjectMissing) as error:
            note(error)
    reads = plan_all(manifest.content)
    with ThreadPoolExecutor(max(1, threads), thread_name_prefix="ckpt-verify") as pool:
        try:
            for future in [pool.submit(check, read) for read in reads]:
                future.result()
        except BaseException:  # an interrupt as well: the pool would wait for all that is queued
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return Verification(checkpoint, len(reads), sum(read.stored for read in reads), tuple(sorted(problems)))
