"""Incremental saves: chunks unchanged since the last committed checkpoint are referenced instead of stored.

A chunk is unchanged if the digest of its bytes before encoding is unchanged. A sample of its beginning is compared
first, so that a state which changes everywhere costs almost nothing. All bytes are hashed only if the chunk is new or
its sample is unchanged. docs/decisions/0018 has the figures, and explains why this is safe.

Where weights are published, chunks that change become deltas of the last committed checkpoint's chunks, whose bytes
before encoding this process keeps (docs/decisions/0042).
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import xxhash
from msgspec.structs import replace

from ckpt.saver.encode import Encode
from ckpt.saver.messages import Setup
from ckptstore import names
from ckptstore.codecs.chunk_codecs import RAW
from ckptstore.codecs.delta import DELTA
from ckptstore.commits.catalog import latest, quarantined_attempts
from ckptstore.commits.commit import read_receipt
from ckptstore.commits.generations import NewAttempt, Session
from ckptstore.commits.leases import end_lease, take_lease
from ckptstore.commits.references import marks
from ckptstore.errors import CkptError, NoCheckpoint
from ckptstore.format.boxes import Box, same_dimensions
from ckptstore.format.documents import DIGEST_BYTES, Content, Receipt, Shard
from ckptstore.format.shards import (
    ChunkSpan,
    EncodedChunk,
    Placed,
    Places,
    RawStream,
    StoredChunk,
    base_table,
    bases_of,
    chunk_table,
    delta_of,
    reference_table,
    rows_of,
)
from ckptstore.names import Attempt, ulid_time
from ckptstore.run import Run
from ckptstore.tiers.replication import unreplicable
from ckptstore.values import Value

logger = logging.getLogger(__name__)


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


class KnownChunk(Value):
    """A chunk of the last committed checkpoint: where it is stored, and how to detect a change."""

    attempt: Attempt
    """The attempt whose shard file stores it."""
    offset: int
    chunk: EncodedChunk
    """Without its data."""
    sample: bytes | None
    raw_digest: bytes | None
    used_up: bool = False
    """It was referenced as often as allowed: the next save stores it again."""
    bases: Sequence[StoredChunk] = ()
    """The chunks that a delta is decoded on."""
    raw: bytes | None = None
    """Its bytes before encoding, if they are kept."""

    @property
    def parts(self) -> list[StoredChunk]:
        """All that is decoded to read it, in order."""
        return [*self.bases, StoredChunk(str(self.attempt), self.offset, self.chunk)]


class Holder(Value):
    """A shard file that stores chunks of the base."""

    bytes: int
    references: int = 0
    """The number of checkpoints that reference it."""


class BaseCheckpoint(Value):
    """This rank's shard of the last committed checkpoint."""

    attempt: Attempt
    chunks: Mapping[Key, KnownChunk]
    holders: Mapping[Attempt, Holder]
    """The shard files that store these chunks, by attempt."""


class Match(Value):
    """The result of comparing one chunk with the base."""

    sample: bytes | None
    raw_digest: bytes | None
    known: KnownChunk | None
    """The equal chunk of the base, which is referenced instead of storing this one; None: store it."""


NOT_COMPARED = Match(None, None, None)


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
    begins = [at for _, _, at in slices]
    for begin, size in chunks:
        entry, box, at = slices[bisect_right(begins, begin) - 1]
        yield entry, box, begin - at, size


def base_of(
    attempt: Attempt, content: Content, shard: Shard, holders: Mapping[Attempt, Holder], most: int
) -> BaseCheckpoint:
    """The base from a shard in the receipt of a rank. holders: the shard files that store its chunks. Pure."""
    entries, slices = content.entries, content.slices
    found: list[tuple[str, Box, int]] = []
    stored = np.setdiff1d(np.flatnonzero(slices.shard == content.shards.index(shard)), slices.derived_rows)
    for group in same_dimensions(content, stored):
        for row, box, size in zip(group.rows.tolist(), group.boxes.tolist(), group.bytes.tolist(), strict=True):
            if size:
                found.append((entries.name[slices.entry[row]], tuple(box), int(slices.at[row])))
    found.sort(key=lambda item: item[2])
    chunks = zip(Places.of(shard).raw[:-1], shard.chunks.raw.tolist(), strict=True)
    return next_base(attempt, shard, keys(found, chunks), [NOT_COMPARED] * len(shard.chunks.raw), holders, 0, most)


def next_base(
    attempt: Attempt,
    shard: Shard,
    found: Iterable[Key],
    matches: Sequence[Match],
    holders: Mapping[Attempt, Holder],
    turn: int,
    most: int,
    raws: Sequence[bytes] = (),
) -> BaseCheckpoint:
    """The base for the save after a committed shard. Pure.

    found, matches: the key of each chunk, and its comparison. holders: the shard files that store its chunks. turn: the
    number of this save. most: the maximum number of checkpoints that reference a chunk. raws: the bytes of the chunks
    before encoding, if they are kept.
    """
    places, bases = Places.of(shard), bases_of(shard)
    files = [attempt, *referenced_by(shard)]
    chunks = {}
    for number, (key, row, match) in enumerate(zip(found, rows_of(shard.chunks), matches, strict=True)):
        holder, offset = places.order(number)
        raw, below = raws[number] if raws else None, bases.get(number, ())
        digest = shard.chunks.raw_digest_of(number)
        if row.codec == RAW:
            digest = bytes.fromhex(row.digest)
        raw_digest = digest if digest != UNKNOWN else None
        needed = {files[holder], *(Attempt.parse(base.attempt) for base in below)}
        references, part = max(holders[file].references for file in needed), number * STEPS // len(matches)
        # The next save stores it again. One part of a shard takes its turn per save, before all are due.
        used_up = references >= most or (references > max(0, most - STEPS) and part == turn % STEPS)
        chunks[key] = KnownChunk(files[holder], offset, row, match.sample, raw_digest, used_up, below, raw)
    return BaseCheckpoint(attempt, chunks, holders)


def referenced_by(shard: Shard) -> list[Attempt]:
    """The other attempts whose chunks a shard needs, in the order of its document. Pure."""
    return [*map(Attempt.parse, shard.needed)]


Unchanged = Callable[[memoryview, ChunkSpan, EncodedChunk], None]
"""Called with the bytes of a chunk, its span, and the equal chunk of the base, without its data."""


def ignore(raw: memoryview, span: ChunkSpan, chunk: EncodedChunk) -> None:
    """Does nothing about an unchanged chunk."""


_LEASE_S = 3600.0
_COMMIT_WAIT_S = 0.5
_MOST_KEPT = 3
"""The bytes of at most so many checkpoints after the base are kept: they are not yet committed."""
_MOST_AGE_S = 7 * 24 * 3600.0
"""Older checkpoints of an earlier process are not referenced. Marks are removed with the checkpoints that reference
them, so their number alone would not grow."""


@dataclass(eq=False)
class ChunkIndex:
    """The chunks of the checkpoint that the next save is compared with.

    It is the last one that this process committed since its last restore; before that, the one that was restored, or
    the latest of the run.

    One thread begins saves, in order, and compares their chunks; one ends saves that are committed, in any order.
    """

    run: Run
    _setup: Setup
    optimizer: bool = False
    """Whether these are the chunks of the shard with optimizer state."""

    def __post_init__(self) -> None:
        setup = self._setup
        self.shard_name = names.shard_name(setup.rank, self.optimizer)
        self.enabled, self.rank, self.most = setup.max_references > 0, setup.rank, setup.max_references
        self._base: BaseCheckpoint | None = None
        self._base_number = 0
        """The number of the save that is the base; less than `_first`: it was committed before the session began."""
        self._session, self._first = "", 1
        """The session of the last save, and the number of its first save."""
        self.deltas = setup.deltas and self.enabled
        self._last: IncrementalSave | None = None
        self._changed = threading.Condition()
        """Guards `ended` of all saves, and the base."""

    def begin(
        self,
        new: NewAttempt,
        raw: RawStream,
        placed: Sequence[Placed],
        spans: Sequence[ChunkSpan],
        encode: Encode,
    ) -> IncrementalSave:
        """Begin a save: compare its chunks. The save before is uploaded. encode: how this save encodes them."""
        number = self._last.number + 1 if self._last else 1
        if new.session.id != self._session:
            self._enter(new.session, number)
        base, self._last = self._wait_for_base(), IncrementalSave(self, new.step, placed, spans, encode, number)
        self._last.compare(raw, base, keeps=self.deltas and number - self._base_number <= _MOST_KEPT)
        return self._last

    def _enter(self, session: Session, number: int) -> None:
        """Compare the saves of a session with the checkpoint that was restored. number: of its first save."""
        begins, self._session = not self._session, session.id
        if self.enabled and (begins or session.parent is not None):
            with self._changed:
                self._first, self._base_number = number, number - 1
            self._load(session.parent)

    def _wait_for_base(self) -> BaseCheckpoint | None:
        """The checkpoint to compare with; None if there is none.

        Waits shortly for this process's first commit. Later saves need not wait: chunks that stay unchanged are in it.
        """
        previous = self._last
        if previous is not None and self._base_number < self._first <= previous.number:
            with self._changed:
                self._changed.wait_for(lambda: previous.ended, _COMMIT_WAIT_S)
        return self._base

    def end(self, save: IncrementalSave, base: BaseCheckpoint | None) -> None:
        """Mark a save as ended, and wake up the save that waits for it.

        base: of a committed one: later saves are compared with it, unless a later one was committed before.
        """
        with self._changed:
            save.ended = True
            if base is not None and save.number > self._base_number:
                self._base, self._base_number = base, save.number
            self._changed.notify_all()

    def forget(self) -> None:
        """The next save stores all chunks: one that the base needs is lost."""
        with self._changed:
            self._base = None

    def protect(self, base: BaseCheckpoint, holder: str) -> tuple[str, set[Attempt]]:
        """Lease the base, which also protects all it references. Returns the lease and the attempts not to reference.

        Raises NoCheckpoint if the base is being deleted, or Unavailable.
        """
        run = self.run
        ttl_s = self._setup.peer_timeout_s + _LEASE_S
        lease = take_lease(run, base.attempt, f"{holder} by rank {self._setup.rank}", ttl_s, thinned=not self.optimizer)
        unfit = set(quarantined_attempts(run))
        if self._setup.remote is not None:
            unfit |= unreplicable(run)
        if unfit:
            # The damaged chunks, or those that are not remote, may lie in a checkpoint that these reference.
            unfit |= {mark.attempt for mark in marks(run) if mark.by in unfit}
        return lease, unfit

    def _load(self, parent: Attempt | None) -> None:
        """Load this checkpoint, or the latest one, as base. Never raises: without a base all chunks are stored."""
        run, rank = self.run, self._setup.rank
        if parent is not None and self._base is not None and self._base.attempt == parent:
            return
        self._base = None
        try:
            attempt = parent or latest(run).attempt
            content = read_receipt(run, attempt, rank).content
            counts = Counter(mark.attempt for mark in marks(run) if not mark.optimizer)
            for shard in (shard for shard in content.shards if shard.name == self.shard_name):
                sizes = {other: run.store.size(run.keys.shard(other, shard.name)) for other in referenced_by(shard)}
                holders = {
                    other: Holder(
                        size, self.most if run.clock() - ulid_time(other.ulid) > _MOST_AGE_S else counts[other]
                    )
                    for other, size in {attempt: shard.stored_bytes, **sizes}.items()
                }
                self._base = base_of(attempt, content, shard, holders, self.most)
        except NoCheckpoint:
            pass
        except CkptError as error:
            logger.warning("the next save stores all chunks, because the last checkpoint cannot be read: %s", error)


class IncrementalSave(msgspec.Struct, eq=False):
    """One incremental save. `compare` comes first."""

    index: ChunkIndex
    step: int
    placed: Sequence[Placed]
    spans: Sequence[ChunkSpan]
    encode: Encode
    number: int
    ended: bool = False
    _matches: list[Match] = []
    _holders: Mapping[Attempt, Holder] = {}
    _lease: str | None = None
    _bases: dict[int, KnownChunk] = {}
    """By the first byte of a chunk that may become a delta."""
    _raws: Sequence[bytes] = ()

    def deltas(self, encode: Encode) -> Encode:
        """Encode as before, or as a delta where that is smaller."""

        def encoded(raw: memoryview, span: ChunkSpan) -> EncodedChunk:
            whole, base = encode(raw, span), self._bases.get(span.at)
            # A delta of other bytes than the stored ones could not be decoded.
            if base is None or not base.raw or xxhash.xxh3_128_digest(base.raw) != base.raw_digest:
                return whole
            return delta_of(raw, base.raw, span, whole)

        return encoded

    def changed(self, raw: RawStream, unchanged: Unchanged = ignore) -> Iterator[tuple[memoryview, ChunkSpan]]:
        """The chunks of a raw stream to store, in order, each with its memory. unchanged: called with the others."""
        for span, match in zip(self.spans, self._matches, strict=True):
            if match.known is None:
                yield span.of(raw), span
            else:
                unchanged(span.of(raw), span, match.known.chunk)

    def raw_digests(self, stored: Sequence[EncodedChunk]) -> list[tuple[ChunkSpan, bytes]]:
        """Each chunk, and the digest of its bytes before encoding, if it was taken. stored: see `shard`."""
        matches, rows = self._matches, iter(stored)
        taken = [bytes.fromhex(next(rows).raw_digest) if match.known is None else b"" for match in matches]
        known = zip(self.spans, matches, taken, strict=True)
        return [(span, match.raw_digest or digest) for span, match, digest in known]

    @property
    def changed_bytes(self) -> int:
        """Raw bytes of the chunks to store."""
        matches = self._matches
        return sum(span.bytes for span, match in zip(self.spans, matches, strict=True) if match.known is None)

    def shard(self, stored: Sequence[EncodedChunk]) -> Shard:
        """The document of the shard. stored: the stored chunks, in order."""
        known, rows = [match.known for match in self._matches], iter(stored)
        chunks = [one.chunk if one is not None else next(rows) for one in known]
        bases = dict[int, Sequence[StoredChunk]]()
        for number, (span, chunk, one) in enumerate(zip(self.spans, chunks, known, strict=True)):
            if chunk.codec == DELTA:
                bases[number] = self._bases[span.at].parts if one is None else one.bases
        table = chunk_table(chunks)
        digests = [match.raw_digest for match in self._matches]
        if self.index.deltas:
            digests = [digest for _, digest in self.raw_digests(stored)]
        if any(digests):
            table = replace(table, raw_digest=b"".join(digest or UNKNOWN for digest in digests))
        references = reference_table(
            (number, str(one.attempt), one.offset) for number, one in enumerate(known) if one is not None
        )
        name, rank = self.index.shard_name, self.index.rank
        return Shard(name=name, rank=rank, chunks=table, references=references, bases=base_table(bases))

    def end(self, receipt: Receipt | None) -> None:
        """End the save. receipt: committed, as base for the next save; None: not committed."""
        base = None
        if receipt is not None and self.index.enabled:
            attempt = Attempt.parse(receipt.attempt)
            for shard in (one for one in receipt.content.shards if one.name == self.index.shard_name):
                counted = {
                    other: replace(held := self._holders[other], references=held.references + 1)
                    for other in referenced_by(shard)
                }
                holders, most = {attempt: Holder(shard.stored_bytes), **counted}, self.index.most
                base = next_base(attempt, shard, self._keys(), self._matches, holders, self.number, most, self._raws)
        self.index.end(self, base)
        lease, self._lease = self._lease, None
        if lease is not None:
            end_lease(self.index.run, lease)

    def compare(self, raw: RawStream, base: BaseCheckpoint | None, keeps: bool = False) -> None:
        """Compare the chunks of a raw stream with the base, and lease what is referenced. keeps: the bytes of all."""
        chunks = base.chunks if base is not None else {}
        pairs = list(zip(self.spans, map(chunks.get, self._keys()), strict=True))
        enabled = self.index.enabled
        matches = [self._match(span, span.of(raw), one) if enabled else NOT_COMPARED for span, one in pairs]
        usable = self._usable(base, (match.known for match in matches if match.known)) if base is not None else ()
        self._matches = [
            match if match.known is None or match.known.attempt in usable else replace(match, known=None)
            for match in matches
        ]
        if usable:
            self._bases = {span.at: one for span, one in pairs if one and one.raw and not one.used_up}
        if keeps:
            same = (match.known.raw if match.known is not None else None for match in self._matches)
            self._raws = [one or bytes(span.of(raw)) for span, one in zip(self.spans, same, strict=True)]

    def _match(self, span: ChunkSpan, raw: memoryview, known: KnownChunk | None) -> Match:
        if known is not None and known.bases and not self.index.deltas:
            known = None  # it would need many checkpoints
        sample, whole, same = compare(raw, known)
        if known is not None and known.raw_digest is None and known.sample == sample:
            # The base has no digest of its raw bytes, since it had changed before. Encoding is deterministic.
            same = replace(self.encode(raw, span), data=b"", raw_digest="") == known.chunk
        return Match(sample, whole, known if same and known is not None and not known.used_up else None)

    def _usable(self, base: BaseCheckpoint, unchanged: Iterable[KnownChunk]) -> Collection[Attempt]:
        """The attempts to reference. They are leased, so that from now on none of them can be deleted."""
        used: Counter[Attempt] = Counter()
        for known in unchanged:
            used[known.attempt] += known.chunk.stored
        chosen, vital = worthwhile(used, base.holders, sum(span.bytes for span in self.spans)), {base.attempt}
        if self.index.deltas:  # which are small, and need all
            chosen = vital = {*base.holders}
        if not chosen:
            return ()
        try:
            self._lease, suspect = self.index.protect(base, f"save of step {self.step}")
        except CkptError as error:
            logger.warning("the save of step %d stores all chunks: %s", self.step, error)
            return ()
        self._holders = {attempt: base.holders[attempt] for attempt in chosen - suspect}
        return () if vital & suspect else chosen - suspect

    def _keys(self) -> Iterator[Key]:
        slices = [(place.slice.entry, place.slice.box, place.at) for place in self.placed if place.slice.bytes]
        return keys(slices, ((span.at, span.bytes) for span in self.spans))
