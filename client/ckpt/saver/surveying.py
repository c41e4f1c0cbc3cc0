"""Takes the statistics of all chunks of a save: the document behind the last chunk of its shard.

Statistics of a chunk that is referenced are those of the equal chunk of the save before. Only a saver that has just
started takes them from the bytes, which it hashes as well then. No error of this module fails a save: the checkpoint
then has no statistics.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from ckpt.saver.deriving import Derived
from ckpt.saver.encode import Encode
from ckpt.saver.statistics import Sampled, chunk_extremes, sample_chunk, tabulate
from ckptstore.codecs.dtypes import ITEM_BYTES
from ckptstore.codecs.extremes import BlockExtremes
from ckptstore.errors import CkptError
from ckptstore.format.documents import JSON
from ckptstore.format.parsing import seal
from ckptstore.format.shards import ChunkSpan, EncodedChunk, Placed, plan_chunks
from ckptstore.format.statistics import SideDocument, Statistics, Table, join, merge, named_document, side_extension
from ckptstore.names import Attempt
from ckptstore.run import Run

logger = logging.getLogger(__name__)

_BATCH = 128  # chunks of one type whose samples are evaluated together

_Identity = tuple[str, tuple[int, ...]]
"""The digest of a chunk's stored bytes, and the number of elements of each slice in it."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """The statistics of the slices of one chunk: rows of a table, from the first on."""

    table: Table
    first: int


@dataclass(frozen=True, slots=True)
class _Parts:
    """The slices in a chunk."""

    numbers: tuple[int, ...]
    sizes: tuple[int, ...]
    """How many of their elements are in it."""
    of: int
    """The number of elements of the first one."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A chunk whose sample is not evaluated yet."""

    at: int
    identity: _Identity
    sample: Sampled


class Surveyor:
    """Begins the survey of each save, and keeps the statistics of the chunks of the last one. For any thread."""

    def __init__(self) -> None:
        self.known: Mapping[_Identity, _Rows] = {}

    def begin(
        self, raw: memoryview, placed: Sequence[Placed], spans: Sequence[ChunkSpan], derived: Sequence[Derived] = ()
    ) -> Survey:
        """Survey a save. raw: the memory of its derived slices, which must stay until the survey is written."""
        return Survey(self, raw, placed, spans, derived)


class Survey:
    """The statistics of one save."""

    def __init__(
        self,
        surveyor: Surveyor,
        raw: memoryview,
        placed: Sequence[Placed],
        spans: Sequence[ChunkSpan],
        derived: Sequence[Derived],
    ) -> None:
        self._surveyor = surveyor
        self._raw = raw if derived else memoryview(b"")
        self._placed = placed
        self._spans = spans
        self._derived = [one.place for one in derived]
        self._parts = dict(zip((span.at for span in spans), _parts(placed, spans), strict=True))
        self._lock = threading.Lock()
        """Guards the fields below."""
        self._waiting: dict[str, list[_Waiting]] = defaultdict(list)
        self._rows: dict[int, _Rows] = {}
        self._known: dict[_Identity, _Rows] = {}
        self._failed = False
        self._document: bytes | None = None
        self._side: SideDocument | None = None

    def observing(self, encode: Encode) -> Encode:
        """Encode chunks and take their statistics."""

        def observed(raw: memoryview, span: ChunkSpan, extremes: BlockExtremes | None = None) -> EncodedChunk:
            parts = self._parts[span.at]
            extremes = chunk_extremes(span.dtype, parts.sizes, parts.of)
            chunk: EncodedChunk = encode(raw, span, extremes)
            self._careful(lambda: self._add(raw, span, chunk.digest, extremes))
            return chunk

        return observed

    def unchanged(self, raw: memoryview, span: ChunkSpan, chunk: EncodedChunk) -> None:
        """Take the statistics of a chunk that is referenced."""
        self._careful(lambda: self._add_unchanged(raw, span, chunk))

    def document(self, attempt: Attempt, rank: int) -> bytes:
        """The document, once all chunks are encoded; the same at each call. Empty after an error. For one thread at a
        time."""
        if self._document is None:
            self._careful(lambda: self._seal(attempt, rank))
            self._document = self._document or b""
            self._surveyor.known = self._known
            self._raw = memoryview(b"")  # the slot's memory must not outlive its use
        return self._document

    def extensions(self, run: Run, attempt: Attempt, rank: int, offset: int | None) -> dict[str, JSON]:
        """The extensions of the receipt, which name the document: none after an error.

        offset: of the document in the shard; None: there is no shard, so it is written as an object of its own, which
        is durable on return.
        """
        data = self.document(attempt, rank)
        if offset is None:
            self._careful(lambda: run.store.put(run.keys.statistics(attempt, rank), data))
        if self._failed or self._side is None:
            return {}
        return side_extension(rank, msgspec.structs.replace(self._side, offset=offset))

    def _seal(self, attempt: Attempt, rank: int) -> None:
        table = join([self._table(), *(self._of_derived(place) for place in self._derived)])
        self._document = seal(Statistics.of(attempt, rank, table))
        names = [place.slice.entry for place in [*self._placed, *self._derived]]
        self._side = named_document(self._document, table, names)

    def _careful(self, work: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            work()
        except CkptError as error:
            self._failed = True
            logger.warning("the statistics of a save could not be written: %s", error)
        except Exception:
            self._failed = True
            logger.exception("the statistics of a save could not be taken, please report this")

    def _add(self, raw: memoryview, span: ChunkSpan, digest: str, extremes: BlockExtremes | None) -> None:
        parts = self._parts[span.at]
        sample = sample_chunk(span.dtype, raw, parts.sizes, extremes, parts.of)
        waiting = _Waiting(span.at, (digest, parts.sizes), sample)
        with self._lock:
            self._waiting[span.dtype].append(waiting)
            if len(self._waiting[span.dtype]) == _BATCH:
                self._evaluate(span.dtype)

    def _add_unchanged(self, raw: memoryview, span: ChunkSpan, chunk: EncodedChunk) -> None:
        identity = chunk.digest, self._parts[span.at].sizes
        rows = self._surveyor.known.get(identity)
        if rows is None:
            self._add(raw, span, chunk.digest, None)
            return
        with self._lock:
            self._rows[span.at] = self._known[identity] = rows

    def _evaluate(self, dtype: str) -> None:
        waiting = self._waiting.pop(dtype)
        table = tabulate(dtype, [one.sample for one in waiting])
        first = 0
        for one in waiting:
            self._rows[one.at] = self._known[one.identity] = _Rows(table, first)
            first += len(one.identity[1])

    def _table(self) -> Table:
        """The statistics of the stored slices, a row each."""
        with self._lock:
            for dtype in list(self._waiting):
                self._evaluate(dtype)
            tables = {id(rows.table): rows.table for rows in self._rows.values()}
            starts, end = {}, 0
            for key, table in tables.items():
                starts[key] = end
                end += len(table.elements)
            group = np.full(end, -1, np.int64)
            for at, parts in self._parts.items():
                rows = self._rows[at]
                first = starts[id(rows.table)] + rows.first
                group[first : first + len(parts.numbers)] = parts.numbers
        return merge(join([Table.empty(0), *tables.values()]), group, len(self._placed))

    def _of_derived(self, place: Placed) -> Table:
        piece, item_bytes = place.slice, ITEM_BYTES[place.slice.dtype]
        raw = self._raw[place.at : place.at + piece.bytes]
        samples = [
            sample_chunk(piece.dtype, span.of(raw), (span.bytes // item_bytes,), of=piece.bytes // item_bytes)
            for span in plan_chunks([Placed(piece, 0)])
        ]
        return merge(tabulate(piece.dtype, samples), np.zeros(len(samples), np.int64), 1)


def _parts(placed: Sequence[Placed], spans: Sequence[ChunkSpan]) -> list[_Parts]:
    """The slices in each chunk. Pure."""
    found: list[_Parts] = []
    slices = ((number, place.slice.bytes, place.at) for number, place in enumerate(placed) if place.slice.bytes)
    number, size, end = -1, 0, 0
    for span in spans:
        item_bytes, at = ITEM_BYTES[span.dtype], span.at
        numbers, sizes, of = list[int](), list[int](), 0
        while at < span.at + span.bytes:
            if end <= at:
                number, size, begin = next(slices)
                end = begin + size
            stop = min(end, span.at + span.bytes)
            numbers.append(number)
            sizes.append((stop - at) // item_bytes)
            of = of or size // item_bytes
            at = stop
        found.append(_Parts(tuple(numbers), tuple(sizes), of))
    return found
