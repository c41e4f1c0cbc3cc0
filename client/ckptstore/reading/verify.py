"""Verification of one checkpoint: every document and every chunk is checked against its parent's checksum."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from hashlib import blake2b
from typing import NamedTuple

from ckptstore.codecs.delta import DELTA
from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.errors import Damaged, ObjectMissing
from ckptstore.format.boxes import check_cover
from ckptstore.format.documents import Manifest
from ckptstore.format.planning import ChunkRead, ShardRead, plan_all
from ckptstore.names import Attempt
from ckptstore.reading.fetch import DEFAULT_THREADS, Progress, check_chunk, decoded, fetch_stored
from ckptstore.reading.restore_check import RestoreCheck, RestoreEstimate, check_restore
from ckptstore.reading.source import Source, read_manifest, read_receipt
from ckptstore.threads import in_parallel


class Verification(NamedTuple):
    """The result of a verification. `problems` is empty if every byte is intact."""

    checkpoint: Checkpoint
    num_chunks: int
    stored_bytes: int
    problems: tuple[str, ...]
    damaged: tuple[ChunkRead, ...] = ()
    """The chunks among the problems."""
    healed: tuple[str, ...] = ()
    """Keys of objects that were written again before this verification."""
    estimates: tuple[RestoreEstimate, ...] = ()
    """How long a restore takes, by number of ranks; only if that was asked for and there is no problem."""

    @property
    def ok(self) -> bool:
        """No problem was found."""
        return not self.problems


class VerifiedChunks:
    """Intact chunks that several checkpoints need, so that each is read once. For any thread."""

    def __init__(self) -> None:
        self.referenced: set[tuple[str, Attempt]] = set()
        """Runs and attempts whose chunks other checkpoints need. Only chunks of these are remembered."""
        self._found: set[bytes] = set()

    def __contains__(self, chunk: tuple[Checkpoint, ChunkRead]) -> bool:
        return _identity(*chunk) in self._found

    def add(self, checkpoint: Checkpoint, read: ChunkRead) -> None:
        """Record that a chunk is intact."""
        if read.attempt is not None or (checkpoint.run, checkpoint.attempt) in self.referenced:
            self._found.add(_identity(checkpoint, read))

    def add_all(self, checkpoint: Checkpoint, reads: Iterable[ChunkRead]) -> None:
        """Record that chunks are intact, even if no other checkpoint needs them."""
        self._found.update(_identity(checkpoint, read) for read in reads)


def _identity(checkpoint: Checkpoint, read: ChunkRead) -> bytes:
    """A hash of the chunk's place and checksum."""
    holder = read.attempt or str(checkpoint.attempt)
    place = (checkpoint.run, holder, read.shard, read.offset, read.stored, read.raw, read.codec, read.digest)
    return blake2b(repr(place).encode(), digest_size=16).digest()


def verify(
    source: Source,
    checkpoint: Checkpoint,
    progress: Progress = lambda _: None,
    threads: int = DEFAULT_THREADS,
    checked: VerifiedChunks | None = None,
    throttle: Progress = lambda _: None,
    only: Collection[tuple[str, int]] | None = None,
    ranks: Collection[int] | None = None,
) -> Verification:
    """Read and check every document and chunk of a checkpoint; continues after a problem, to report all of them.

    progress is called with the number of stored bytes checked. checked: chunks that are not read again. throttle is
    called with the number of bytes read, and may block. only: shard and number of the chunks to check; None: all. All
    documents are checked in any case. ranks: also prove that it restores on so many ranks and on the number that
    saved, estimate the time, and decode every chunk; each byte is still read once. Raises Unavailable, which is not a
    finding.
    """
    if checkpoint.state is State.CORRUPT:
        return Verification(checkpoint, 0, 0, (checkpoint.problem,))
    known = checked or VerifiedChunks()
    check = RestoreCheck() if ranks is None else check_restore(source, checkpoint, ranks)
    if check.reads:
        known.add_all(checkpoint, (part for read in check.reads for chunk in read.chunks for part in chunk.parts))
        throttle(sum(read.bytes for read in check.reads))
    problems, manifest = _check_documents(source, checkpoint)
    damaged: list[ChunkRead] = []

    def examine(read: ChunkRead) -> None:
        if (checkpoint, read) not in known:
            try:
                if ranks is None or (read.codec == DELTA and not read.bases):  # one base alone gives nothing
                    check_chunk(checkpoint, read, fetch_stored(source, checkpoint, ShardRead((read,))))
                else:
                    decoded(source, checkpoint, read.parts)
                known.add(checkpoint, read)
            except (Damaged, ObjectMissing) as error:
                problems.append(str(error))
                damaged.append(read)
            throttle(read.stored)
        progress(read.stored)

    planned = plan_all(manifest.content) if manifest is not None else ()
    reads = [part for read in planned if only is None or (read.shard, read.index) in only for part in read.parts]
    in_parallel(examine, reads, threads)
    stored_bytes = sum(read.stored for read in reads)
    if not problems and check.problem:
        problems.append(check.problem)
    estimates = () if problems else check.estimates
    return Verification(
        checkpoint, len(reads), stored_bytes, tuple(sorted(problems)), tuple(damaged), estimates=estimates
    )


def _check_documents(source: Source, checkpoint: Checkpoint) -> tuple[list[str], Manifest | None]:
    """The problems of all documents, and the manifest unless it is one of them."""
    problems: list[str] = []
    try:
        manifest = read_manifest(source, checkpoint)
        check_cover(manifest.content)
    except (Damaged, ObjectMissing) as error:
        return [str(error)], None
    for rank in range(manifest.world_size):
        try:
            read_receipt(source, checkpoint, manifest, rank)
        except (Damaged, ObjectMissing) as error:
            problems.append(str(error))
    return problems, manifest
