"""Statistics of one chunk, taken while it is encoded. Pure; numpy releases the GIL in its loops.

NaN and Inf are counted exactly, and extremes are exact. The encoder finds the extremes block by block
(ckptstore/codecs/extremes.py); they show whether any number is not finite, and only then are all words classified.
Other quantities come from a sample of large slices: a pass over all words would cost 3 % of encoding float32. After
a chunk its memory is no longer in the cache, and neither is code; so most work waits until many chunks are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np

from ckptstore.codecs.chunk_codecs import FLOAT_SPLIT
from ckptstore.codecs.dtypes import FLOATS, ITEM_BYTES, FloatLayout, Numbers, Words, decode_words, layout_of, words_of
from ckptstore.codecs.extremes import BlockExtremes
from ckptstore.codecs.float_split import GROUP
from ckptstore.codecs.passes import BLOCK_BYTES
from ckptstore.format.columns import Column, distinct
from ckptstore.format.shards import CHUNK_BYTES
from ckptstore.format.statistics import Table

WHOLE = 1024
"""So many numbers are sampled from a slice, or from CHUNK_BYTES of a larger one; of one that has no more, all are."""
_LOOKS = 4  # blocks of the encoder that are sampled
_RUN = 32  # numbers that are sampled together, since each read of memory brings a whole cache line
_GOLDEN = 0.6180339887498949
_SQUARE_OVERFLOWS = 1e150

_Bounds = tuple[int, int, int]
"""The largest word as unsigned and as signed number, and the smallest as unsigned number. The last is needed only
where all numbers have the same sign."""


@dataclass(frozen=True, slots=True, eq=False)
class ChunkSample:
    """The part of a chunk that is kept until its statistics are computed together with those of others."""

    sample: _Sample
    taken: Sequence[Words]
    """The sampled words, in parts."""
    low: Sequence[float]
    high: Sequence[float]
    """The words of the smallest and the largest finite number of each slice; the numbers themselves of integers."""
    counts: Sequence[Column]
    """The numbers of NaN, Inf and -Inf in each slice; empty: there are none."""


Sampled = ChunkSample | BlockExtremes
"""The memory of one chunk: a sample of its own, or the findings of its encoder."""


def chunk_extremes(dtype: str, sizes: Sequence[int], of: int = 0) -> BlockExtremes | None:
    """What the encoder of a chunk updates; None: nothing, because the chunk has several slices or another type.

    sizes, of: see `sample_chunk`.
    """
    if len(sizes) > 1 or dtype not in FLOAT_SPLIT:
        return None
    item_bytes = ITEM_BYTES[dtype]
    return BlockExtremes(sizes[0], _in_blocks(sizes[0], item_bytes, _quota(sizes[0], of, item_bytes)))


def sample_chunk(
    dtype: str, raw: memoryview, sizes: Sequence[int], extremes: BlockExtremes | None = None, of: int = 0
) -> Sampled:
    """The sample and the exact quantities of the slices in a chunk. The result does not refer to `raw`.

    sizes: their numbers of elements in the chunk, which add up to it. extremes: those of `chunk_extremes`, after the
    chunk was encoded; None: it was not. of: the number of elements of its slice, if it has only one. Both parts of a
    complex number count as elements.
    """
    if extremes is not None and extremes.added and _suffices(dtype, raw, extremes):
        return extremes
    words = words_of(dtype, raw)
    parts = len(words) // sum(sizes)
    quota = WHOLE if len(sizes) > 1 else _quota(sizes[0] * parts, of * parts, words.itemsize)
    sample = _sample_of(tuple(size * parts for size in sizes), words.itemsize, quota)
    layout, starts = layout_of(dtype), sample.starts
    taken = [words.take(sample.index)]
    if layout is None:
        smallest, largest = (function.reduceat(words, starts) for function in (np.minimum, np.maximum))
        return ChunkSample(sample, taken, smallest.tolist(), largest.tolist(), ())
    bounds, counts = _bounds(words, starts), list[Column]()
    if not _is_finite(layout, words, bounds):
        kinds = _classes(layout, words)
        counts = [np.add.reduceat(kind, starts, dtype=np.int64) for kind in kinds]
        bounds = _bounds(words, starts, ~(kinds[0] | kinds[1] | kinds[2]))
    low, high = zip(*(_range(layout, *one) for one in bounds), strict=True)
    return ChunkSample(sample, taken, low, high, counts)


def _suffices(dtype: str, raw: memoryview, extremes: BlockExtremes) -> bool:
    """Whether the encoder found all: there is no NaN or Inf, and a number that is not negative."""
    if extremes.added < extremes.size:
        extremes.add_rest(words_of(dtype, raw)[extremes.added :])
    layout = FLOATS[dtype]
    return extremes.unsigned <= layout.last | layout.sign and 0 <= extremes.signed <= layout.last


def _evaluated(dtype: str, chunk: Sampled) -> ChunkSample:
    if isinstance(chunk, ChunkSample):
        return chunk
    low, high = _range(FLOATS[dtype], *chunk.bounds)
    return ChunkSample(_sample_in_blocks(chunk.size, sum(map(len, chunk.taken))), chunk.taken, (low,), (high,), ())


def tabulate(dtype: str, sampled_chunks: Sequence[Sampled]) -> Table:
    """The statistics of the slices in some chunks of one element type, a row each, in order."""
    layout = layout_of(dtype)
    chunks = [_evaluated(dtype, one) for one in sampled_chunks]
    taken = np.concatenate([part for chunk in chunks for part in chunk.taken])
    sampled = np.concatenate([chunk.sample.counts for chunk in chunks])
    sizes = np.concatenate([chunk.sample.sizes for chunk in chunks])
    row, first, scale = np.repeat(np.arange(len(sizes)), sampled), np.cumsum(sampled) - sampled, sizes / sampled
    values = decode_words(dtype, taken)
    zeros = np.add.reduceat(values == 0.0, first, dtype=np.int64) * scale
    nan, positive, negative = counts = _counts(chunks)
    minimum, maximum = (_bound(dtype, one) for one in ([c.low for c in chunks], [c.high for c in chunks]))
    finite = sizes - nan - positive - negative
    minimum, maximum = np.where(finite > 0, minimum, np.nan), np.where(finite > 0, maximum, np.nan)
    used = sampled
    if np.any(counts):
        is_finite = np.isfinite(values)
        values = np.where(is_finite, values, 0.0)
        used = np.add.reduceat(is_finite, first, dtype=np.int64)
    mean, rms = _moments(values, row, first, used, np.fmax(np.abs(minimum), np.abs(maximum)))
    histogram = _histogram(layout, taken, row, scale) if layout is not None else _NO_HISTOGRAM
    return Table(sizes, sampled, nan, positive, negative, zeros, minimum, maximum, mean, rms, *histogram)


@dataclass(frozen=True, slots=True, eq=False)
class _Sample:
    """Which numbers of a chunk are sampled: runs at fixed pseudorandom places, evenly spread over each slice."""

    sizes: Column
    starts: Column
    """First element of each slice in the chunk."""
    index: Column
    """Places of the sampled numbers in the chunk."""
    counts: Column
    """Sampled numbers of each slice."""


def _quota(size: int, of: int, item_bytes: int) -> int:
    """How many numbers are sampled from a part of a slice, which has `of`: its share, in whole runs."""
    share = size * WHOLE // max(1, min(of, CHUNK_BYTES // item_bytes))
    return min(WHOLE, max(1, share // _RUN) * _RUN) if of > WHOLE else WHOLE


@lru_cache(maxsize=256)
def _sample_in_blocks(size: int, count: int) -> _Sample:
    """So many numbers of a chunk with one slice, at known places."""
    return _Sample(np.array([size]), np.zeros(1, np.int64), np.zeros(0, np.int64), np.array([count]))


@lru_cache(maxsize=256)
def _sample_of(sizes: tuple[int, ...], item_bytes: int, quota: int) -> _Sample:
    given = np.array(sizes, np.int64)
    starts = np.cumsum(given) - given
    block = BLOCK_BYTES // item_bytes
    found = [start + _runs(size, block, quota) for start, size in zip(starts.tolist(), sizes, strict=True)]
    counts = np.array([len(one) for one in found], np.int64)
    return _Sample(given, starts, np.concatenate(found), counts)


def _runs(size: int, block: int, quota: int) -> Column:
    """The places of one slice. Those of a large one are in some of the encoder's blocks: each look costs time."""
    if size <= quota:
        return np.arange(size)
    runs = quota // _RUN
    blocks = size // block
    looks = _LOOKS if blocks >= 2 * _LOOKS else 1
    number = np.arange(runs)
    place = (number + ((number + 1) * _GOLDEN) % 1.0) * (looks / runs)
    look = place.astype(np.int64)
    begin, length = ((2 * look + 1) * blocks // (2 * looks) * block, block) if looks > 1 else (0, size)
    starts = begin + np.minimum(((place - look) * length).astype(np.int64), length - _RUN)
    # Runs that overlap must not count a number twice.
    return distinct(starts[:, None] + np.arange(_RUN))


@lru_cache(maxsize=256)
def _in_blocks(size: int, item_bytes: int, quota: int) -> tuple[Column | None, ...]:
    """Places of a slice's sample in each of the encoder's blocks, and in the few words after them."""
    index = _sample_of((size,), item_bytes, quota).index
    whole = size // GROUP * GROUP
    starts = [*range(0, whole, BLOCK_BYTES // item_bytes), whole]
    parts = np.split(index, np.searchsorted(index, starts[1:]))
    return tuple(part - start if len(part) else None for part, start in zip(parts, starts, strict=True))


def _bounds(words: Words, starts: Column, finite: Words | None = None) -> list[_Bounds]:
    """The bounds of each slice, of the finite words if these are given."""
    signed = words.view(f"i{words.itemsize}")
    unsigned, smallest = words, words
    if finite is not None:
        low, high = np.iinfo(signed.dtype).min, np.iinfo(words.dtype).max
        unsigned, smallest = (
            np.where(finite, words, words.dtype.type(0)),
            np.where(finite, words, words.dtype.type(high)),
        )
        signed = np.where(finite, signed, signed.dtype.type(low))
    found = (
        np.maximum.reduceat(unsigned, starts),
        np.maximum.reduceat(signed, starts),
        np.minimum.reduceat(smallest, starts),
    )
    return list(zip(*(one.tolist() for one in found), strict=True))


def _is_finite(layout: FloatLayout, words: Words, bounds: Sequence[_Bounds]) -> bool:
    if layout.nan is not None:
        return not np.count_nonzero(words == layout.nan)
    if not layout.sign:
        return all(lowest <= layout.last for lowest, _, _ in bounds)
    most = layout.last | layout.sign
    return all(lowest <= most and largest <= layout.last for lowest, largest, _ in bounds)


def _classes(layout: FloatLayout, words: Words) -> tuple[Words, Words, Words]:
    """Which words are NaN, infinite and positive, infinite and negative."""
    kind = words.dtype.type
    none = np.zeros(len(words), np.bool_)
    if layout.nan is not None:
        return words == layout.nan, none, none
    magnitude = words & kind(~layout.sign & int(np.iinfo(kind).max))
    if layout.infinity is None:
        return magnitude > layout.last, none, none
    return magnitude > layout.infinity, words == kind(layout.infinity), words == kind(layout.infinity | layout.sign)


def _range(layout: FloatLayout, lowest: int, largest: int, nearest: int) -> tuple[int, int]:
    """The words of the smallest and of the largest number."""
    if not layout.sign:
        return nearest, lowest
    if lowest == layout.sign:
        nearest = 0  # -0 is below positive numbers
    return lowest if lowest > layout.sign else nearest, largest if largest >= 0 else nearest


def _counts(chunks: Sequence[ChunkSample]) -> Sequence[Column]:
    if not any(chunk.counts for chunk in chunks):
        return [np.zeros(sum(len(chunk.low) for chunk in chunks), np.int64)] * 3
    given = [chunk.counts or [np.zeros(len(chunk.low), np.int64)] * 3 for chunk in chunks]
    return [np.concatenate(kind) for kind in zip(*given, strict=True)]


def _bound(dtype: str, words: Iterable[Sequence[float]]) -> Numbers:
    layout = layout_of(dtype)
    found = list(chain.from_iterable(words))
    if layout is None:
        return np.array(found, np.float64)
    return decode_words(dtype, np.array(found, layout.word)) + 0.0  # not -0.0


def _moments(values: Numbers, row: Column, first: Column, used: Column, largest: Numbers) -> tuple[Numbers, Numbers]:
    """Mean and root mean square of each slice. used: its finite sampled numbers. largest: its largest magnitude."""
    scale: Any = 1.0
    if (largest > _SQUARE_OVERFLOWS).any():
        scale = np.where(largest > _SQUARE_OVERFLOWS, largest, 1.0)
        values = values / scale[row]
    count = np.maximum(used, 1)
    mean = np.add.reduceat(values, first) / count * scale
    rms = np.sqrt(np.add.reduceat(values * values, first) / count) * scale
    # Where a sample missed all finite numbers of a slice, the largest one stands for them.
    return np.where(used > 0, mean, largest), np.where(used > 0, rms, largest)


def _histogram(layout: FloatLayout, taken: Words, row: Column, scale: Numbers) -> tuple[Column, Column, Numbers]:
    """The buckets of all slices: row, exponent field and number of elements."""
    field = taken >> taken.dtype.type(layout.mantissa)
    field &= taken.dtype.type(layout.exponents - 1)
    keys = row * layout.exponents
    np.add(keys, field, keys, casting="unsafe")  # each copy of so many numbers costs as much as everything else
    if len(scale) * layout.exponents <= len(keys):
        bins = np.bincount(keys)
        keys = bins.nonzero()[0]
        count = bins[keys]
    else:
        keys, count = np.unique(keys, return_counts=True)
    rows = keys // layout.exponents
    return rows, keys % layout.exponents, count * scale[rows]


_NO_HISTOGRAM = np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0)
