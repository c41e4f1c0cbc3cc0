"""Takes the statistics of all chunks of a save: the document behind the last chunk of its shard.

The codec finds the extremes of a chunk while it is in the cache. They show whether any number is NaN or Inf, and only
then are the numbers looked at again. The statistics of a referenced chunk are those of the equal chunk in the save
before; a saver that has just started takes them from the bytes. No error of this module fails a save: the checkpoint
then has no statistics.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import chain
from math import isfinite
from typing import NamedTuple

import msgspec
import numpy as np

from ckpt.saver.deriving import Derived
from ckpt.saver.encode import Encode
from ckptstore.codecs.chunk_codecs import FLOAT_SPLIT
from ckptstore.codecs.dtypes import ITEM_BYTES, Extremes, is_float, numbers_of
from ckptstore.codecs.float_split import scan
from ckptstore.errors import CkptError
from ckptstore.format.documents import JSON
from ckptstore.format.parsing import seal
from ckptstore.format.shards import ChunkSpan, EncodedChunk, Placed, RawStream, plan_chunks
from ckptstore.format.statistics import SideDocument, Statistics, Table, merge, named_document, side_extension
from ckptstore.names import Attempt
from ckptstore.run import Run

logger = logging.getLogger(__name__)

Rows = Sequence[tuple[float, ...]]
"""The statistics of slices, as rows of a Table."""
ChunkTables = dict[tuple[str, str, Sequence[int]], Rows]
"""By the digest of a chunk's stored bytes, its element type, and the number of elements of each slice in it."""


class _Parts(NamedTuple):
    """The slices in a chunk."""

    numbers: Sequence[int]
    sizes: Sequence[int]
    """How many of their elements are in it."""


class ShardStatistics:
    """The statistics of one save of a rank. Chunks are added in several threads."""

    def __init__(
        self,
        known: ChunkTables,
        raw: RawStream,
        placed: Sequence[Placed],
        spans: Sequence[ChunkSpan],
        derived: Sequence[Derived] = (),
    ) -> None:
        """known: the chunks of the save before. raw: the memory of derived slices, which must stay until `document`."""
        self.chunks: ChunkTables = {}
        """Those that were added so far."""
        self._known = known
        self._raw: RawStream = raw if derived else memoryview(b"")
        self._placed = placed
        self._derived = [one.place for one in derived]
        self._parts = _parts(placed, sorted(spans, key=lambda span: span.at))
        self._tables: dict[int, Rows] = {}
        self._failed = False
        self._document: bytes | None = None
        self._side: SideDocument | None = None

    def observing(self, encode: Encode) -> Encode:
        """Encode chunks and take their statistics."""

        def observed(raw: memoryview, span: ChunkSpan) -> EncodedChunk:
            extremes = chunk_extremes(span.dtype, self._parts[span.at].sizes)
            chunk: EncodedChunk = encode(raw, span, extremes)
            self._careful(lambda: self._add(raw, span, chunk, extremes))
            return chunk

        return observed

    def unchanged(self, raw: memoryview, span: ChunkSpan, chunk: EncodedChunk) -> None:
        """Take the statistics of a chunk that is referenced."""
        self._careful(lambda: self._add(raw, span, chunk, None))

    def document(self, attempt: Attempt, rank: int) -> bytes:
        """The document, once all chunks are encoded; the same at each call. Empty after an error. For one thread at a
        time."""
        if self._document is None:
            self._careful(lambda: self._seal(attempt, rank))
            self._document = self._document or b""
            self._raw, self._known = memoryview(b""), {}  # the slot's memory must not outlive its use
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

    def _add(self, raw: memoryview, span: ChunkSpan, chunk: EncodedChunk, extremes: Extremes | None) -> None:
        sizes = self._parts[span.at].sizes
        identity = chunk.digest, span.dtype, sizes
        table = self._known.get(identity)
        if table is None:
            table = chunk_table(span.dtype, raw, sizes, extremes)
        self._tables[span.at] = self.chunks[identity] = table

    def _seal(self, attempt: Attempt, rank: int) -> None:
        tables = [self._tables[at] for at in self._parts]
        rows = [number for parts in self._parts.values() for number in parts.numbers]
        for number, place in enumerate(self._derived, len(self._placed)):
            raw = self._raw[place.at : place.at + place.slice.bytes]
            for span in plan_chunks([Placed(place.slice, 0)]):
                tables.append(chunk_table(span.dtype, span.of(raw), (span.bytes // ITEM_BYTES[span.dtype],)))
                rows.append(number)
        names = [place.slice.entry for place in (*self._placed, *self._derived)]
        table = merge([Table.of([*chain(*tables)])], np.array(rows, np.int64), len(names))
        self._document = seal(Statistics.of(attempt, rank, table))
        self._side = named_document(self._document, table, names)


def chunk_extremes(dtype: str, sizes: Sequence[int]) -> Extremes | None:
    """The extremes that a chunk's encoder updates; None: nothing, because it has several slices or another type."""
    return Extremes(dtype) if len(sizes) == 1 and dtype in FLOAT_SPLIT else None


def chunk_table(dtype: str, raw: memoryview, sizes: Sequence[int], extremes: Extremes | None = None) -> Rows:
    """The statistics of the slices in a chunk, a row each. Pure.

    sizes: their numbers of elements in the chunk, which add up to it. extremes: those of `chunk_extremes`, after the
    chunk was encoded. Both parts of a complex number count as elements.
    """
    if extremes is None and (extremes := chunk_extremes(dtype, sizes)) is not None:
        scan(raw, extremes)
    if extremes is not None:
        bounds = extremes.bounds()
        if all(map(isfinite, bounds)):
            return [(*sizes, 0, 0, 0, *bounds)]
    numbers = numbers_of(dtype, raw)
    elements = np.array(sizes) * (len(numbers) // sum(sizes))
    starts = np.cumsum(elements) - elements
    with np.errstate(invalid="ignore"):  # a signalling NaN
        low, high = (one.reduceat(numbers, starts).astype(np.float64) for one in (np.minimum, np.maximum))
    counts = [np.zeros_like(elements)] * 3
    if is_float(dtype) and not np.isfinite([low, high]).all():
        kinds = np.isnan(numbers), numbers == np.inf, numbers == -np.inf
        counts = [np.add.reduceat(kind, starts, dtype=np.int64) for kind in kinds]
        finite = np.where(np.isfinite(numbers), numbers, np.nan)
        low, high = (one.reduceat(finite, starts).astype(np.float64) for one in (np.fmin, np.fmax))
    return [*zip(*(one.tolist() for one in (elements, *counts, low, high)), strict=True)]


def _parts(placed: Sequence[Placed], spans: Sequence[ChunkSpan]) -> dict[int, _Parts]:
    """The slices in each chunk, by its first byte. Pure."""
    found: dict[int, _Parts] = {}
    filled = [(place.at + place.slice.bytes, number) for number, place in enumerate(placed) if place.slice.bytes]
    slices, end, number = iter(sorted(filled)), 0, -1
    for span in spans:
        numbers, sizes, at = list[int](), list[int](), span.at
        while at < span.at + span.bytes:
            if end <= at:
                end, number = next(slices)
            stop = min(end, span.at + span.bytes)
            numbers.append(number)
            sizes.append((stop - at) // ITEM_BYTES[span.dtype])
            at = stop
        found[span.at] = _Parts(tuple(numbers), tuple(sizes))
    return found
