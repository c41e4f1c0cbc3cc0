"""Which chunks are unchanged since a checkpoint, and which checkpoints are worth referencing. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from ckptstore.codecs.chunk_codecs import RAW
from ckptstore.format.boxes import Box, same_dimensions
from ckptstore.format.columns import column
from ckptstore.format.documents import DIGEST_BYTES, Chunks, Content, Shard
from ckptstore.format.places import Places
from ckptstore.format.shards import EncodedChunk
from ckptstore.names import Attempt

SAMPLE_BYTES = 64 << 10
LEAST_SHARE = 16
"""A checkpoint is referenced only if at least 1/LEAST_SHARE of its stored bytes is referenced."""
MOST_ATTEMPTS = 16
"""The maximum number of checkpoints that one rank's shard references."""
STEPS = 4
"""Chunks that are stored again are spread over this number of saves."""
UNKNOWN = bytes(DIGEST_BYTES)

Key = tuple[str, Box, int, int]
"""Identifies a chunk across saves: the slice it begins in (entry and box), the byte within it, the raw size."""


@dataclass(frozen=True, slots=True)
class KnownChunk:
    """A chunk of the last committed checkpoint: where it is stored, and how to detect a change."""

    attempt: Attempt
    """The attempt whose shard file stores it."""
    offset: int
    chunk: EncodedChunk
    """Without its data."""
    sample: bytes | None
    raw_digest: bytes | None
    same: bool | None
    """Whether it was unchanged since the checkpoint before that one; None: unknown."""
    used_up: bool = False
    """It was referenced as often as allowed: the next save stores it again."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A shard file that stores chunks of the base."""

    bytes: int
    references: int = 0
    """The number of checkpoints that reference it."""


@dataclass(frozen=True, slots=True)
class BaseCheckpoint:
    """This rank's shard of the last committed checkpoint."""

    attempt: Attempt
    chunks: Mapping[Key, KnownChunk]
    holders: Mapping[Attempt, Holder]
    """The shard files that store these chunks, by attempt."""


@dataclass(frozen=True, slots=True)
class Match:
    """The result of comparing one chunk with the base."""

    sample: bytes | None
    raw_digest: bytes | None
    same: bool | None
    """Whether it is unchanged; None if the base has no such chunk."""
    known: KnownChunk | None
    """The equal chunk of the base, which is referenced instead of storing this one; None: store it."""


NOT_COMPARED = Match(None, None, None, None)


def compare(raw: memoryview, known: KnownChunk | None) -> tuple[bytes, bytes | None, bool]:
    """The digest of the chunk's sample, that of all bytes if it may be needed, and whether it is unchanged. Pure."""
    sample = xxhash.xxh3_128_digest(raw[:SAMPLE_BYTES])
    if known is not None and known.sample not in (None, sample):
        return sample, None, False
    whole = sample if len(raw) <= SAMPLE_BYTES else xxhash.xxh3_128_digest(raw)
    return sample, whole, known is not None and known.raw_digest == whole


def worthwhile(used: Mapping[Attempt, int], holders: Mapping[Attempt, Holder], total: int) -> set[Attempt]:
    """The attempts that are worth referencing. Pure.

    used: for each candidate, the stored bytes that would be referenced. total: the size of the new checkpoint. A
    referenced shard file is kept whole, so the unreferenced bytes kept in all of them must not exceed `total`.
    """
    chosen: set[Attempt] = set()
    unused = 0
    for attempt, count in sorted(used.items(), key=lambda item: (-item[1], item[0])):
        size = holders[attempt].bytes
        waste = size - count
        if len(chosen) < MOST_ATTEMPTS and count * LEAST_SHARE >= size and unused + waste <= total:
            chosen.add(attempt)
            unused += waste
    return chosen


def keys(slices: Sequence[tuple[str, Box, int]], chunks: Iterable[tuple[int, int]]) -> Iterator[Key]:
    """The key of each chunk. slices: entry, box, first byte in the raw stream, ascending; chunks: first byte, size."""
    begins = column(at for _, _, at in slices)
    for begin, size in chunks:
        entry, box, at = slices[int(np.searchsorted(begins, begin, side="right")) - 1]
        yield entry, box, begin - at, size


def base_of(attempt: Attempt, content: Content, holders: Mapping[Attempt, Holder], most: int) -> BaseCheckpoint:
    """The base from the receipt of a rank. holders: the shard files that store its chunks. Pure."""
    shard, entries, slices = content.shards[0], content.entries, content.slices
    found: list[tuple[str, Box, int]] = []
    stored = np.setdiff1d(np.arange(len(slices.entry)), slices.derived_rows)
    for group in same_dimensions(content, stored):
        for row, box, size in zip(group.rows.tolist(), group.boxes.tolist(), group.bytes.tolist(), strict=True):
            if size:
                found.append((entries.name[int(slices.entry[row])], tuple(box), int(slices.at[row])))
    found.sort(key=lambda item: item[2])
    places = Places.of(shard)
    chunks = zip(places.raw[:-1], shard.chunks.raw.tolist(), strict=True)
    return next_base(attempt, shard, keys(found, chunks), [NOT_COMPARED] * len(shard.chunks.raw), holders, 0, most)


def next_base(
    attempt: Attempt,
    shard: Shard,
    found: Iterable[Key],
    matches: Sequence[Match],
    holders: Mapping[Attempt, Holder],
    turn: int,
    most: int,
) -> BaseCheckpoint:
    """The base for the save after a committed shard. Pure.

    found, matches: the key of each chunk, and its comparison. holders: the shard files that store its chunks. turn: the
    number of this save. most: the maximum number of checkpoints that reference a chunk.
    """
    places, digests = Places.of(shard), shard.chunks.raw_digest
    files = [attempt, *referenced_by(shard)]
    chunks = {}
    for number, (key, row, match) in enumerate(zip(found, rows_of(shard.chunks), matches, strict=True)):
        holder, offset = places.order(number)
        digest = digests[DIGEST_BYTES * number : DIGEST_BYTES * (number + 1)] if digests is not None else UNKNOWN
        if row.codec == RAW:
            digest = bytes.fromhex(row.digest)
        raw_digest = digest if digest != UNKNOWN else None
        used_up = _is_used_up(holders[files[holder]].references, number * STEPS // len(matches), turn, most)
        chunks[key] = KnownChunk(files[holder], offset, row, match.sample, raw_digest, match.same, used_up)
    return BaseCheckpoint(attempt, chunks, holders)


def _is_used_up(references: int, part: int, turn: int, most: int) -> bool:
    """Whether the next save stores a chunk again. One part of a shard takes its turn per save, before all are due.

    part: of the shard, 0 to STEPS - 1, that has the chunk. turn: counts saves.
    """
    return references >= most or (references > max(0, most - STEPS) and part == turn % STEPS)


def referenced_by(shard: Shard) -> list[Attempt]:
    """The attempts whose chunks a shard references, in the order of its document. Pure."""
    return [Attempt.parse(text) for text in shard.references.attempts] if shard.references is not None else []


def rows_of(chunks: Chunks) -> Iterator[EncodedChunk]:
    """The chunks of a table, without their data. Pure."""
    for number, (raw, stored) in enumerate(zip(chunks.raw.tolist(), chunks.stored.tolist(), strict=True)):
        yield EncodedChunk(b"", raw, stored, chunks.codec_of(number), chunks.digest_of(number))
