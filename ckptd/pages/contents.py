"""Views of the contents of a checkpoint: bytes by rank, and sizes of entries. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ckptapi.bodies import EntryBody, ShardBody
from ckptstore import human
from ckptstore.analysis.charts import Tick
from ckptstore.names import MAX_RANKS

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP = 1088, 200, 74, 1068, 10


class Bar(NamedTuple):
    """The mean and the maximum of adjacent values."""

    x: float
    width: float
    mean: float
    """Height from the bottom."""
    largest: float
    title: str


class Bars(NamedTuple):
    """A bar chart; adjacent values share a bar if there are too many."""

    width: int
    height: int
    left: int
    right: int
    bottom: int
    bars: tuple[Bar, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]


class ContentsView(NamedTuple):
    """The contents of a checkpoint, from its manifest."""

    map: Bars
    """Stored bytes by rank."""
    num_writers: int
    shards: Sequence[ShardBody]
    items: Sequence[tuple[str, int, int]]
    """Name, number of entries and raw bytes of each item of the state: model, optim, ..."""
    entries: Sequence[EntryBody]
    """The largest first, as of shards and items."""
    values: Mapping[str, str]
    """Numbers and strings beside tensors, by path."""


def contents_view(
    world_size: int, shards: Sequence[ShardBody], entries: Sequence[EntryBody], values: Mapping[str, str]
) -> ContentsView:
    """The view of a checkpoint. entries: all of them."""
    written = [0] * min(world_size, MAX_RANKS)  # an index of an older daemon may hold any number
    for shard in shards:
        if shard.rank < len(written):
            written[shard.rank] += shard.stored_bytes
    return ContentsView(
        map=bars(written, "rank", human.size),
        num_writers=sum(1 for count in written if count),
        shards=sorted(shards, key=lambda shard: (-shard.stored_bytes, shard.rank)),
        items=_items(entries),
        entries=sorted(entries, key=lambda entry: (-entry.raw_bytes, entry.name)),
        values=values,
    )


def _items(entries: Sequence[EntryBody]) -> list[tuple[str, int, int]]:
    sizes: dict[str, list[int]] = defaultdict(list)
    for entry in entries:
        sizes[entry.name.partition("/")[0]].append(entry.raw_bytes)
    rows = [(name, len(own), sum(own)) for name, own in sizes.items()]
    return sorted(rows, key=lambda row: (-row[2], row[0]))


def bars(values: Sequence[int], name: str, write: Callable[[int], str]) -> Bars:
    """A bar for each value, or for groups of adjacent values, so that there are at most 128 bars.

    name: of the item that a value belongs to; items are numbered from 0. write: formats a value.
    """
    bottom = _HEIGHT - 26
    group = -(-len(values) // 128) or 1
    spans = [range(at, min(at + group, len(values))) for at in range(0, len(values), group)]
    high = max(values, default=0) or 1
    width = (_RIGHT - _LEFT) / max(1, len(spans))
    drawn = []
    for i, span in enumerate(spans):
        own = [values[at] for at in span]
        mean, largest = sum(own) / len(own), max(own)
        text = f"{name} {span[0]}: {write(largest)}"
        if len(own) > 1:
            text = f"{name}s {span[0]}–{span[-1]}: {write(int(mean))} each, {write(largest)} at most"
        scale = (bottom - _TOP) / high
        drawn.append(Bar(round(_LEFT + i * width, 2), round(width * 0.86, 2), mean * scale, largest * scale, text))
    labels = [span[0] for span in spans]
    every = -(-len(labels) // 12) or 1
    x_ticks = tuple(Tick(_LEFT + (i + 0.43) * width, str(labels[i])) for i in range(0, len(labels), every))
    y_ticks = tuple(Tick(bottom - (bottom - _TOP) * part, write(int(high * part))) for part in (0.0, 0.5, 1.0))
    return Bars(_WIDTH, _HEIGHT, _LEFT, _RIGHT, bottom, tuple(drawn), x_ticks, y_ticks)
