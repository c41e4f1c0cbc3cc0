"""Random layouts of entries in shards, and the manifests that describe them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from ckptstore import names
from ckptstore.format import boxes
from ckptstore.format.boxes import Box
from ckptstore.format.columns import column
from ckptstore.format.documents import Chunks, Content, Entries, Shard, Slices, digest

DTYPES = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64", 16: "complex128"}


def region(box: Box) -> tuple[slice, ...]:
    """A box as numpy's index."""
    return tuple(slice(o, o + s) for o, s in zip(boxes.offsets(box), boxes.sizes(box), strict=True))


def cut(shape: Sequence[int], fractions: Sequence[float], times: int) -> list[Box]:
    """The whole, cut in two as often as said, each cut within one box: tilings that no grid gives."""
    found, numbers = [boxes.whole(shape)], iter(fractions)
    for _ in range(times if shape else 0):
        box, where = found.pop(int(next(numbers) * len(found))), next(numbers)
        dimension = int(where * 1000) % len(shape)
        start, size = box[dimension], box[len(shape) + dimension]
        first = int(where * (size + 1))
        low, high = list(box), list(box)
        low[len(shape) + dimension] = first
        high[dimension], high[len(shape) + dimension] = start + first, size - first
        found += [tuple(low), tuple(high)]
    return found


@st.composite
def tilings(draw: st.DrawFn, shape: Sequence[int]) -> list[Box]:
    """Boxes that tile a shape; some may be empty."""
    times = draw(st.integers(0, 5))
    fractions = draw(st.lists(st.floats(0, 0.999), min_size=2 * times, max_size=2 * times))
    return cut(shape, fractions, times)


@st.composite
def boxes_within(draw: st.DrawFn, shape: Sequence[int]) -> Box:
    """Any box, also an empty one."""
    starts = [draw(st.integers(0, size)) for size in shape]
    return (*starts, *(draw(st.integers(0, size - start)) for size, start in zip(shape, starts, strict=True)))


@dataclass(frozen=True)
class Layout:
    """Entries with their values, as a manifest says that shards hold them."""

    content: Content
    arrays: dict[str, npt.NDArray[Any]]
    streams: dict[str, bytes]
    """Bytes of each shard; nothing is encoded."""


def deal(
    arrays: dict[str, npt.NDArray[Any]], tiled: dict[str, list[Box]], shards: int, chunks: Iterator[int]
) -> Layout:
    """Boxes dealt to shards in turn. chunks: how many elements a chunk has, but no chunk has two element sizes."""
    entries = Entries(
        name=list(arrays),
        dtype=[DTYPES[array.itemsize] for array in arrays.values()],
        shape=[list(array.shape) for array in arrays.values()],
    )
    rows: list[tuple[int, int, int, Box]] = []
    streams = [bytearray() for _ in range(shards)]
    raw: list[list[int]] = [[] for _ in range(shards)]
    for entry, name in enumerate(arrays):
        for box in tiled[name]:
            shard = len(rows) % shards
            rows.append((entry, shard, len(streams[shard]), box))
            data = arrays[name][region(box)].tobytes()
            streams[shard] += data
            item, left = arrays[name].itemsize, len(data)
            while left:
                raw[shard].append(min(left, next(chunks) * item))
                left -= raw[shard][-1]
    slices = Slices(
        entry=column(row[0] for row in rows), shard=column(row[1] for row in rows), at=column(row[2] for row in rows),
        box=column(number for row in rows for number in row[3]),
    )  # fmt: skip
    found = [_shard(rank, bytes(stream), raw[rank]) for rank, stream in enumerate(streams)]
    content = Content(shards=found, entries=entries, slices=slices, aliases={}, trees={})
    return Layout(content, arrays, {shard.name: bytes(s) for shard, s in zip(found, streams, strict=True)})


def _shard(rank: int, stream: bytes, raw: list[int]) -> Shard:
    ends = np.cumsum(raw).tolist()
    digests = b"".join(bytes.fromhex(digest(stream[end - size : end])) for end, size in zip(ends, raw, strict=True))
    sizes = column(raw)
    chunks = Chunks(
        raw=sizes, stored=sizes, codec=np.zeros(len(raw), np.int64), codecs=["raw"] if raw else [], digest=digests
    )
    return Shard(name=names.shard_name(rank), rank=rank, chunks=chunks)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """One to three entries of up to four dimensions, in boxes, in shards, in chunks."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    tiled = {}
    for number in range(draw(st.integers(1, 3))):
        shape = draw(st.lists(st.integers(0, 6), max_size=4))
        item = draw(st.sampled_from(sorted(DTYPES)))
        data = np.random.default_rng(number).bytes(prod(shape) * item)
        arrays[f"entry-{number}"] = np.frombuffer(data, f"V{item}").reshape(shape)
        tiled[f"entry-{number}"] = draw(tilings(shape))
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    return deal(arrays, tiled, draw(st.integers(1, 3)), _again(sizes))


def _again(numbers: Sequence[int]) -> Iterator[int]:
    while True:
        yield from numbers


def with_slices(content: Content, rows: Sequence[int]) -> Content:
    """The same content with these slices, in this order, some perhaps twice and others missing."""
    slices = content.slices
    dimensions = [len(content.entries.shape[entry]) for entry in slices.entry.tolist()]
    ends = np.cumsum([0, *(2 * count for count in dimensions)]).tolist()
    kept = np.array(rows, np.int64)
    box = column(number for row in rows for number in slices.box[ends[row] : ends[row + 1]].tolist())
    changed = Slices(entry=slices.entry[kept], shard=slices.shard[kept], at=slices.at[kept], box=box)
    return Content(
        shards=content.shards, entries=content.entries, slices=changed, aliases=content.aliases, trees=content.trees
    )


def box_of(content: Content, row: int) -> Box:
    at = sum(2 * len(content.entries.shape[entry]) for entry in content.slices.entry[:row].tolist())
    count = 2 * len(content.entries.shape[int(content.slices.entry[row])])
    return tuple(content.slices.box[at : at + count].tolist())
