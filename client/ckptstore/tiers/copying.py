"""Copying: stores a checkpoint of one store in another one, chunk by chunk, without decoding it.

The copy is a new attempt of the same step in the newest generation of its run, committed by the same protocol as a
save: it exists as a whole or not at all. Its attempt follows from that of the original, so a copy that was interrupted
continues where it stopped. Chunks that the original references are stored with the copy, and deltas as whole chunks.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import NamedTuple

import msgspec

from ckptstore import names
from ckptstore.codecs.chunk_codecs import RAW
from ckptstore.commits.catalog import Checkpoint, State, find, joined_generation, read_checkpoint
from ckptstore.commits.commit import EARLIER, commit_attempt, read_outcome
from ckptstore.commits.hidden import hidden_attempts
from ckptstore.commits.labels import LabelChange, change_labels, label_versions, labelled, with_labels
from ckptstore.errors import CorruptObject, InvalidRequest, NoCheckpoint, ObjectMissing
from ckptstore.format.documents import BASES, JSON, Manifest, Receipt, Shard, digest
from ckptstore.format.merging import StoredReceipt
from ckptstore.format.parsing import parse_sealed, seal
from ckptstore.format.planning import ChunkRead, ShardRead, join, plan_all
from ckptstore.format.shards import EncodedChunk, chunk_table
from ckptstore.format.statistics import SideDocument, Statistics, extension_name, side_documents, side_extension
from ckptstore.names import THINNED, Attempt, Reference, derive_ulid
from ckptstore.reading.fetch import Progress, check_chunk, decoded, fetch_stored
from ckptstore.reading.source import Source, read_manifest, read_receipt, statistics_name, stored_statistics
from ckptstore.retention.deletion import write_tombstone
from ckptstore.run import Run

_THREADS = 8
_READ_BYTES = (4 << 20) - (8 << 10)
"""Bytes of adjacent chunks that are read at once: with the blocks in which they begin and end, two huge pages. One read
for each thread, and one more, are in memory."""


class Copied(NamedTuple):
    """A checkpoint in the other store."""

    checkpoint: Checkpoint
    existed: bool
    """A copy of the same original was there before."""


def copy_checkpoint(source: Source, original: Checkpoint, target: Run, progress: Progress) -> Copied:
    """Copy a checkpoint into a run of another store; it exists there on return.

    progress is called with the stored bytes that were copied, or found in the target and verified. Raises
    InvalidRequest if the step has another checkpoint in the target, or if the copy would replace a later step as the
    newest; CorruptObject if the original is damaged; then nothing is committed. Raises Unavailable if a store fails.
    """
    there = _existing(target, original)
    if there is not None:
        progress(original.needed_bytes)
        return Copied(copy_labels(source, original, target, there), existed=True)
    attempt = _new_attempt(target, original)
    manifest = read_manifest(source, original)
    reads = chunks_by_shard(manifest)
    sides = dict[int, dict[str, JSON]]()
    for shard, side in zip(manifest.content.shards, side_documents(manifest), strict=True):
        found = _copy_data(source, original, shard, reads[shard.name], side, target, attempt, progress)
        sides[shard.rank] = sides.get(shard.rank, {}) | found
    if original.thinned:
        write_tombstone(target, attempt, THINNED)
    receipts = [
        _copy_receipt(source, original, manifest, rank, target, attempt, sides.get(rank, {}))
        for rank in range(manifest.world_size)
    ]
    commit_attempt(target, receipts)
    made = read_checkpoint(target, attempt, thinned=[attempt] if original.thinned else ())
    assert made is not None
    return Copied(copy_labels(source, original, target, made), existed=False)


def copy_labels(source: Source, original: Checkpoint, target: Run, copy: Checkpoint) -> Checkpoint:
    """The copy with the original's tags and later metrics, unless it has labels of its own. Raises Unavailable.

    A command that was interrupted after the commit may have left it without them.
    """
    [found] = with_labels(target, [copy])
    later = {name: value for name, value in original.metrics.items() if copy.metrics.get(name) != value}
    if (original.tags or later) and copy.attempt not in label_versions(target):
        change = LabelChange(dict(original.tags), later)
        return labelled(copy, change_labels(target, copy.attempt, change, f"copied from {source.url}"))
    return found


def _existing(target: Run, original: Checkpoint) -> Checkpoint | None:
    """The copy of the original, if it exists undamaged. Raises InvalidRequest for another checkpoint of the step."""
    try:
        found = find(target.store, Reference(target.name, original.step))
    except NoCheckpoint:
        return None
    own = {original.attempt.ulid, *_ulids(target, original)}
    if found.attempt.ulid in own:
        return None if found.state is State.CORRUPT else found
    raise InvalidRequest(
        f"{found.id} exists in {target.store.url}, and is not a copy of {original.id}",
        "Copy to another run with --as NAME; committed checkpoints are never overwritten",
    )


def _ulids(target: Run, original: Checkpoint) -> list[str]:
    # More than one: a copy that was deleted there, or aborted as an orphan, keeps its name.
    return [derive_ulid(original.attempt.ulid, "copy", target.name, number) for number in range(16)]


def _new_attempt(target: Run, original: Checkpoint) -> Attempt:
    generation = joined_generation(target, original.step)
    hidden = hidden_attempts(target)
    for ulid in _ulids(target, original):
        attempt = Attempt(original.step, ulid, generation=generation)
        if read_outcome(target, attempt) is None and attempt not in hidden:
            return attempt
    raise InvalidRequest(
        f"copies of {original.id} were deleted too often in {target.store.url}", "Copy to another run with --as NAME"
    )


def _copy_data(
    source: Source, original: Checkpoint, shard: Shard, reads: Sequence[ChunkRead], side: SideDocument | None,
    target: Run, attempt: Attempt, progress: Progress,
) -> dict[str, JSON]:  # fmt: skip
    """Copy the chunks of a rank, and its statistics unless they are missing or damaged.

    Returns the extension of its receipt that names the statistics.
    """
    data = stored_statistics(source, original, shard.rank, side)
    if data:
        document = parse_sealed(data, Statistics, statistics_name(original, shard.rank))
        data = seal(msgspec.structs.replace(document, attempt=str(attempt)))
    reads = _whole(shard, reads)
    apart = not reads or names.is_optimizer_shard(shard.name)
    copy_shard(source, original, shard, reads, data, apart, target, attempt, progress)
    if side is None or not data:
        return {}
    offset = None if apart else sum(read.stored for read in reads)
    named = msgspec.structs.replace(side, digest=digest(data), bytes=len(data), offset=offset)
    return side_extension(shard.rank, named)


def chunks_by_shard(document: Manifest | Receipt) -> Mapping[str, Sequence[ChunkRead]]:
    """The chunks that a checkpoint needs, by the shard in whose table they are, in its order. Pure."""
    found = defaultdict[str, list[ChunkRead]](list)
    for read in sorted(plan_all(document.content), key=lambda read: read.index):
        found[read.shard].append(read)
    return found


def _whole(shard: Shard, reads: Sequence[ChunkRead]) -> list[ChunkRead]:
    """Chunks as a copy has them: a delta is stored as it is before encoding, and `bases` are all that it is read of."""

    def whole(read: ChunkRead) -> ChunkRead:
        digest = shard.chunks.raw_digest_of(read.index).hex()
        return msgspec.structs.replace(read, stored=read.raw, codec=RAW, digest=digest, bases=read.parts)

    return [whole(read) if read.bases else read for read in reads]


def _whole_shard(shard: Shard, reads: Sequence[ChunkRead]) -> Shard:
    """The document of a shard that has these chunks, and needs no other checkpoint."""
    chunks = shard.chunks
    if shard.bases is not None:
        table = chunk_table([EncodedChunk(b"", r.raw, r.stored, r.codec, r.digest) for r in _whole(shard, reads)])
        chunks = msgspec.structs.replace(table, raw_digest=chunks.raw_digest)
    return Shard(name=shard.name, rank=shard.rank, chunks=chunks)


def copy_shard(
    source: Source, original: Checkpoint, shard: Shard, reads: Sequence[ChunkRead], statistics: bytes, apart: bool,
    target: Run, attempt: Attempt, progress: Progress,
) -> None:  # fmt: skip
    """Copy these chunks of a shard, back to back, into one object of an attempt, and the statistics of its rank behind
    them, or into an object of their own; durable on return.

    Chunks are not written again if it has them. Raises Damaged, ObjectMissing or Unavailable.
    """
    if apart and statistics:
        target.store.put(target.keys.statistics(attempt, shard.rank), statistics)
    if not reads:
        return
    key, tail = target.keys.shard(attempt, shard.name), b"" if apart else statistics
    size = sum(read.stored for read in reads)
    there = _has(target, key, reads, tail)
    if there:
        progress(size)
        return
    # The remains of a killed copy are replaced, not deleted: another copy may be about to commit it.
    write = target.store.open_writer if there is None else target.store.open_replacement
    with write(key, size + len(tail)) as writer:
        for data in _fetch_in_order(source, original, reads):
            writer.write(data)
            progress(len(data))
        writer.write(tail)


def _has(target: Run, key: str, reads: Sequence[ChunkRead], tail: bytes) -> bool | None:
    """Whether the object has exactly these chunks, and this tail; None if it does not exist."""
    try:
        if target.store.size(key) != sum(read.stored for read in reads) + len(tail):
            return False
        with target.store.open_reader(key) as reader:
            at = 0
            for read in reads:
                if digest(reader.read_once(at, read.stored)) != read.digest:
                    return False
                at += read.stored
            return reader.read_once(at, len(tail)) == tail
    except ObjectMissing:
        return None
    except CorruptObject:
        return False


def _fetch_in_order(source: Source, original: Checkpoint, chunks: Iterable[ChunkRead]) -> Iterator[memoryview]:
    """The stored bytes of chunks, checked, adjacent ones together, with only a few of them in memory."""

    def fetch(read: ShardRead) -> memoryview:
        if bases := read.chunks[0].bases:  # such a chunk is alone
            return decoded(source, original, bases)
        stored = fetch_stored(source, original, read, again=False)
        for chunk in read.chunks:
            at = chunk.offset - read.offset
            check_chunk(original, chunk, stored[at : at + chunk.stored])
        return stored

    threads = min(_THREADS, source.parallel_reads)
    with ThreadPoolExecutor(threads, thread_name_prefix="ckpt-copy") as pool:
        begun = (pool.submit(fetch, read) for read in join((ShardRead((chunk,)) for chunk in chunks), _READ_BYTES))
        waiting = deque(islice(begun, threads + 1))
        try:
            while waiting:
                yield waiting.popleft().result()
                waiting += islice(begun, 1)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _copy_receipt(
    source: Source, original: Checkpoint, manifest: Manifest, rank: int, target: Run, attempt: Attempt,
    side: dict[str, JSON],
) -> StoredReceipt:  # fmt: skip
    """Write the receipt of a rank for the copy: its content is the same, but nothing is referenced.

    side: the extension that names its statistics, in place of the original's.
    """
    receipt = read_receipt(source, original, manifest, rank)
    reads = chunks_by_shard(receipt)
    shards = [_whole_shard(shard, reads[shard.name]) for shard in receipt.content.shards]
    extensions = dict(receipt.extensions)
    extensions.pop(extension_name(rank), None)
    extensions.pop(EARLIER, None)  # they were not copied
    extensions.pop(BASES, None)
    copied: Receipt = msgspec.structs.replace(
        receipt,
        run=target.name,
        attempt=str(attempt),
        content=msgspec.structs.replace(receipt.content, shards=shards),
        extensions={**extensions, **side},
    )
    data = seal(copied)
    target.store.put(target.keys.receipt(attempt, rank), data)
    return StoredReceipt.of(copied, data)
