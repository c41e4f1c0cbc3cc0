"""Chunks that did not change since the last committed checkpoint: found by digest, and referenced. No torch.

A chunk is unchanged if its bytes before encoding have the digest that they had then. A sample of its beginning is
compared first, so that a state which changes throughout costs next to nothing; and a digest of all bytes is only made
of chunks that are new or whose sample is as it was. docs/decisions/0018 has the figures, and why this is safe.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np
import xxhash
from msgspec.structs import replace as with_fields

from ckpt.saving.encode import Encode
from ckpt.saving.messages import Setup
from ckptstore import names
from ckptstore.catalog import latest, quarantined_attempts
from ckptstore.clock import Clock
from ckptstore.commit import read_receipt
from ckptstore.errors import CkptError, NoCheckpoint
from ckptstore.format.boxes import Box, same_dimensions
from ckptstore.format.codecs import RAW
from ckptstore.format.columns import column
from ckptstore.format.documents import DIGEST_BYTES, Chunks, Content, References, Shard
from ckptstore.format.places import Places
from ckptstore.format.shards import ChunkSpan, EncodedChunk, Placed, chunk_table
from ckptstore.names import Attempt
from ckptstore.references import marks
from ckptstore.retention.leases import release_lease, take_lease
from ckptstore.stores import Store

logger = logging.getLogger(__name__)

SAMPLE_BYTES = 64 << 10
LEAST_SHARE = 16
"""Chunks of a checkpoint are referenced only if they are at least one in so many bytes of what it stores."""
MOST_ATTEMPTS = 16
"""So many checkpoints are referenced by one rank's shard at most."""
_LEASE_S = 3600.0
_PATIENCE_S = 0.5
_LOOK_AGAIN_S = 0.05
_UNKNOWN = bytes(DIGEST_BYTES)

Key = tuple[str, Box, int, int]
"""Where a chunk is looked for again: the slice that it begins in (entry and box), the byte of it, the raw size."""


@dataclass(frozen=True, slots=True)
class Known:
    """A chunk of the last checkpoint that was committed: where it lies, and what tells whether it has changed."""

    attempt: str
    """Who holds it."""
    offset: int
    chunk: EncodedChunk
    """Without its data."""
    sample: bytes | None
    raw_digest: bytes | None


@dataclass(frozen=True, slots=True)
class Base:
    """The last checkpoint that was committed, as far as this rank's shard goes."""

    attempt: Attempt
    chunks: Mapping[Key, Known]
    sizes: Mapping[str, int]
    """Stored bytes of the shard files that these chunks lie in, by attempt."""


@dataclass(frozen=True, slots=True)
class _Look:
    """What comparing one chunk came to."""

    sample: bytes | None
    raw_digest: bytes | None
    known: Known | None
    """The chunk that it is equal to."""


def compare(raw: memoryview, known: Known | None) -> tuple[bytes, bytes | None, bool]:
    """The digest of the chunk's sample, that of all of it where it may be needed, and whether it is unchanged. Pure."""
    sample = xxhash.xxh3_128_digest(raw[:SAMPLE_BYTES])
    if known is not None and known.sample not in (None, sample):
        return sample, None, False
    whole = sample if len(raw) <= SAMPLE_BYTES else xxhash.xxh3_128_digest(raw)
    return sample, whole, known is not None and known.raw_digest == whole


def worthwhile(used: Mapping[str, int], sizes: Mapping[str, int], total: int) -> set[str]:
    """The attempts whose chunks are referenced, of those that could be. Pure.

    used: the stored bytes of each that would be. total: the size of the new checkpoint. What is referenced stays whole,
    so that it must be worth it: all that stays and nobody uses is together at most as large as the checkpoint.
    """
    chosen: set[str] = set()
    unused = 0
    for attempt, count in sorted(used.items(), key=lambda item: (-item[1], item[0])):
        waste = sizes[attempt] - count
        if len(chosen) < MOST_ATTEMPTS and count * LEAST_SHARE >= sizes[attempt] and unused + waste <= total:
            chosen.add(attempt)
            unused += waste
    return chosen


def keys(slices: Sequence[tuple[str, Box, int]], chunks: Iterable[tuple[int, int]]) -> Iterator[Key]:
    """The key of each chunk. slices: entry, box, first byte in the raw stream, rising; chunks: first byte and size."""
    begins = column(at for _, _, at in slices)
    for begin, size in chunks:
        entry, box, at = slices[int(np.searchsorted(begins, begin, side="right")) - 1]
        yield entry, box, begin - at, size


class Memory:
    """What a saver knows of the last checkpoint of the run, so that it stores only what is new.

    One thread begins saves, in order; one decides, one ends them.
    """

    def __init__(self, store: Store, setup: Setup, clock: Clock, run_soon: Callable[..., Future[None]]) -> None:
        """run_soon: runs a function in another thread, which reads what an earlier process committed."""
        self._store = store
        self._setup = setup
        self._clock = clock
        self.enabled, self.rank = setup.reference, setup.rank
        self._base: Base | None = None
        self._own = False
        self._last: Save | None = None
        self._loaded: Future[None] | None = run_soon(self._load) if setup.reference else None

    def begin(
        self, attempt: str, placed: Sequence[Placed], spans: Sequence[ChunkSpan], raw: memoryview | None, encode: Encode
    ) -> Save:
        """A save whose chunks will be compared when they are asked for. encode: how they are encoded in this save.

        raw: the raw stream; None if it is not there as a whole: then all chunks are stored.
        """
        self._last = Save(self, attempt, placed, spans, raw, encode, self._last)
        return self._last

    def settle(self, save: Save, previous: Save | None) -> Base | None:
        """The base to compare with. Waits for this process's first: whatever is unchanged from then on is in it."""
        if self._loaded is None:
            return None
        self._loaded.result()
        if not self._own and previous is not None:
            while not save.ended.is_set() and not previous.uploaded.wait(_LOOK_AGAIN_S):
                pass  # nothing is lost: the upload of this save could not begin either
            previous.ended.wait(0.0 if save.ended.is_set() else _PATIENCE_S)
        return self._base

    def learn(self, base: Base) -> None:
        """What the saves to come are compared with: a save of this process is committed."""
        self._base, self._own = base, True

    def protect(self, base: Base, holder: str) -> tuple[str, set[str]]:
        """Hold the base by a lease, and with it all that it references. Gives that, and who must not be referenced.

        Raises NoCheckpoint if the base is being deleted, or Unavailable.
        """
        store, run = self._store, self._setup.run
        ttl_s = self._setup.commit_timeout_s + _LEASE_S
        lease = take_lease(store, run, base.attempt, f"{holder} by rank {self._setup.rank}", ttl_s, self._clock)
        damaged = set(quarantined_attempts(store, run))
        suspect = {str(attempt) for attempt in damaged}
        if damaged:
            # What was found damaged may be so in chunks of others.
            suspect |= {str(mark.attempt) for mark in marks(store, run) if mark.by in damaged}
        return lease, suspect

    def release(self, lease: str) -> None:
        """End a lease."""
        try:
            release_lease(self._store, self._setup.run, lease)
        except CkptError as error:
            logger.warning("lease %s was not released and will expire: %s", lease, error)

    def _load(self) -> None:
        """Begin with the latest checkpoint of the run. Never raises: what is not known is stored."""
        store, run, rank = self._store, self._setup.run, self._setup.rank
        try:
            attempt = latest(store, run).attempt
            content = read_receipt(store, run, attempt, rank).receipt.content
            for shard in content.shards:
                others = shard.references.attempts if shard.references is not None else []
                sizes = {text: store.size(names.shard_key(run, Attempt.parse(text), shard.name)) for text in others}
                self._base = base_of(attempt, content, sizes)
        except NoCheckpoint:
            pass
        except CkptError as error:
            logger.warning("the next save stores all chunks, because the last checkpoint cannot be read: %s", error)


class Save:
    """One save, which stores the chunks that changed. `changed` is for one thread; everything else waits for it."""

    def __init__(
        self,
        memory: Memory,
        attempt: str,
        placed: Sequence[Placed],
        spans: Sequence[ChunkSpan],
        raw: memoryview | None,
        encode: Encode,
        previous: Save | None,
    ) -> None:
        self.uploaded, self.ended = threading.Event(), threading.Event()
        self._memory = memory
        self._attempt = attempt
        self._placed = placed
        self._spans = spans
        self._raw = raw
        self._encode = encode
        self._previous = previous
        self._looks: Future[list[_Look]] = Future()
        self._sizes: Mapping[str, int] = {}
        self._lease: str | None = None

    def changed(self) -> Iterator[tuple[memoryview, ChunkSpan]]:
        """The chunks to be stored, in order, each with its memory, if that is known. Compares all of them first."""
        raw, self._raw = self._raw, None
        try:
            self._looks.set_result(self._compare(raw))
        except BaseException as error:
            self._looks.set_exception(error)
            raise
        for span, look in zip(self._spans, self._looks.result(), strict=True):
            if look.known is None:
                yield span.of(raw) if raw is not None else memoryview(b""), span

    @property
    def unchanged_bytes(self) -> int:
        """Raw bytes of the chunks that are referenced."""
        return sum(span.bytes for span in self._spans) - self.changed_bytes

    @property
    def changed_bytes(self) -> int:
        """Raw bytes of the chunks to be stored."""
        looks = self._looks.result()
        return sum(span.bytes for span, look in zip(self._spans, looks, strict=True) if look.known is None)

    def shard(self, stored: Chunks | None) -> Shard:
        """The document of the shard. stored: of the chunks that were stored, in order; None if there are none."""
        looks = self._looks.result()
        rows = iter(_rows(stored) if stored is not None else ())
        table = chunk_table([look.known.chunk if look.known is not None else next(rows) for look in looks])
        if any(look.raw_digest for look in looks):
            table = with_fields(table, raw_digest=b"".join(look.raw_digest or _UNKNOWN for look in looks))
        referenced = [(number, look.known) for number, look in enumerate(looks) if look.known is not None]
        attempts = sorted({known.attempt for _, known in referenced})
        references = References(
            attempts=attempts,
            chunk=column(number for number, _ in referenced),
            attempt=column(attempts.index(known.attempt) for _, known in referenced),
            offset=column(known.offset for _, known in referenced),
        )
        rank = self._memory.rank
        return Shard(name=names.shard_name(rank), rank=rank, chunks=table, references=references if attempts else None)

    def end(self, content: Content | None) -> None:
        """The save is over. content: of a committed one, which the next save is compared with."""
        if content is not None and content.shards and self._memory.enabled:
            samples = [look.sample for look in self._looks.result()]
            attempt, shard = Attempt.parse(self._attempt), content.shards[0]
            self._memory.learn(_base(attempt, shard, self._keys(), samples, self._sizes))
        self.uploaded.set()
        self.ended.set()
        self._release()

    def _release(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            self._memory.release(lease)

    def _compare(self, raw: memoryview | None) -> list[_Look]:
        previous, self._previous = self._previous, None
        if raw is None or not self._memory.enabled:
            return [_Look(None, None, None) for _ in self._spans]
        base = self._memory.settle(self, previous)
        known = base.chunks if base is not None else {}
        looks = []
        for span, key in zip(self._spans, self._keys(), strict=True):
            looks.append(self._look(span, span.of(raw), known.get(key)))
        usable = self._usable(base, looks) if base is not None else set()
        return [look if look.known and look.known.attempt in usable else replace(look, known=None) for look in looks]

    def _look(self, span: ChunkSpan, raw: memoryview, known: Known | None) -> _Look:
        sample, whole, same = compare(raw, known)
        if known is not None and known.raw_digest is None and known.sample == sample:
            # It changed until now. Encoding makes the same of the same.
            same = replace(self._encode(raw, span), data=b"") == known.chunk
        return _Look(sample, whole, known if same else None)

    def _usable(self, base: Base, looks: Sequence[_Look]) -> Collection[str]:
        """The attempts that may and should be referenced; from now on none of them can be deleted."""
        used: Counter[str] = Counter()
        for look in looks:
            if look.known is not None:
                used[look.known.attempt] += look.known.chunk.stored
        chosen = worthwhile(used, base.sizes, sum(span.bytes for span in self._spans))
        if not chosen:
            return ()
        try:
            self._lease, suspect = self._memory.protect(base, f"save of {self._attempt}")
        except CkptError as error:
            logger.warning("%s stores all chunks: %s", self._attempt, error)
            return ()
        if self.ended.is_set():  # given up meanwhile
            self._release()
        self._sizes = {attempt: base.sizes[attempt] for attempt in chosen - suspect}
        return () if str(base.attempt) in suspect else chosen - suspect

    def _keys(self) -> Iterator[Key]:
        slices = [(place.slice.entry, place.slice.box, place.at) for place in self._placed if place.slice.bytes]
        return keys(slices, ((span.at, span.bytes) for span in self._spans))


def base_of(attempt: Attempt, content: Content, sizes: Mapping[str, int]) -> Base:
    """What the receipt of a rank tells of its shard. sizes: of the shard files that it references. Pure."""
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
    return _base(attempt, shard, keys(found, chunks), [None] * len(shard.chunks.raw), sizes)


def _base(
    attempt: Attempt,
    shard: Shard,
    found: Iterable[Key],
    samples: Sequence[bytes | None],
    sizes: Mapping[str, int],
) -> Base:
    places, digests = Places.of(shard), shard.chunks.raw_digest
    holders = [str(attempt), *(shard.references.attempts if shard.references is not None else ())]
    chunks = {}
    for number, (key, row, sample) in enumerate(zip(found, _rows(shard.chunks), samples, strict=True)):
        holder, offset = places.order(number)
        digest = digests[DIGEST_BYTES * number : DIGEST_BYTES * (number + 1)] if digests is not None else _UNKNOWN
        if row.codec == RAW:
            digest = bytes.fromhex(row.digest)
        chunks[key] = Known(holders[holder], offset, row, sample, digest if digest != _UNKNOWN else None)
    return Base(attempt, chunks, {str(attempt): shard.stored_bytes, **sizes})


def _rows(chunks: Chunks) -> Iterator[EncodedChunk]:
    for number, (raw, stored) in enumerate(zip(chunks.raw.tolist(), chunks.stored.tolist(), strict=True)):
        yield EncodedChunk(b"", raw, stored, chunks.codec_of(number), chunks.digest_of(number))
