"""Views of the contents of a checkpoint: bytes by rank, and sizes of entries. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptapi.bodies import EntryBody, ShardBody
from ckptd.pages.charts import Bars, bars
from ckptd.pages.treemap import Rect, treemap
from ckptstore import human
from ckptstore.names import MAX_RANKS

_SHARDS_SHOWN = 32
_ENTRIES_SHOWN = 20


@dataclass(frozen=True, slots=True)
class ItemRow:
    """One item of the state: model, optim, ..."""

    name: str
    num_entries: int
    raw_bytes: int
    kind: int | None
    """Its color in the treemap."""
    x: float
    """The left edge of its part of a bar, in per cent of the bar."""
    width: float


@dataclass(frozen=True, slots=True)
class ContentsView:
    """The contents of a checkpoint, from its manifest."""

    map: Bars
    """Stored bytes by rank."""
    num_writers: int
    most: ShardBody | None
    """The largest shard."""
    shards: tuple[ShardBody, ...]
    num_shards: int
    boxes: tuple[Rect, ...]
    items: tuple[ItemRow, ...]
    entries: tuple[EntryBody, ...]
    """The largest entries."""
    num_entries: int


def contents_view(world_size: int, shards: Sequence[ShardBody], entries: Sequence[EntryBody]) -> ContentsView:
    """The view of a checkpoint. entries: all of them."""
    written = [0] * min(world_size, MAX_RANKS)  # an index of an older daemon may hold any number
    for shard in shards:
        if shard.rank < len(written):
            written[shard.rank] += shard.stored_bytes
    by_size = sorted(entries, key=lambda entry: (-entry.raw_bytes, entry.name))
    largest = sorted(shards, key=lambda shard: (-shard.stored_bytes, shard.rank))
    boxes = tuple(treemap({entry.name: entry.raw_bytes for entry in entries}))
    return ContentsView(
        map=bars(written, "rank", human.size),
        num_writers=sum(1 for count in written if count),
        most=largest[0] if largest else None,
        shards=tuple(largest[:_SHARDS_SHOWN]),
        num_shards=len(shards),
        boxes=boxes,
        items=_items(entries, {box.path.partition("/")[0]: box.kind for box in boxes}),
        entries=tuple(by_size[:_ENTRIES_SHOWN]),
        num_entries=len(entries),
    )


def _items(entries: Sequence[EntryBody], kinds: Mapping[str, int]) -> tuple[ItemRow, ...]:
    totals: dict[str, tuple[int, int]] = {}
    for entry in entries:
        name = entry.name.partition("/")[0]
        count, size = totals.get(name, (0, 0))
        totals[name] = (count + 1, size + entry.raw_bytes)
    whole, x, rows = sum(size for _, size in totals.values()) or 1, 0.0, []
    for name, (count, size) in sorted(totals.items(), key=lambda item: (-item[1][1], item[0]))[:_SHARDS_SHOWN]:
        rows.append(ItemRow(name, count, size, kinds.get(name), round(x, 3), round(100 * size / whole, 3)))
        x += 100 * size / whole
    return tuple(rows)
