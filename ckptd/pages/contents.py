"""Views of the contents of a checkpoint: bytes by rank, and sizes of entries. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ckptapi.bodies import EntryBody, ShardBody
from ckptd.pages.charts import Bars, bars
from ckptstore import human
from ckptstore.names import MAX_RANKS

_SHARDS_SHOWN = 32
_ENTRIES_SHOWN = 50


@dataclass(frozen=True, slots=True)
class ItemRow:
    """One item of the state: model, optim, ..."""

    name: str
    num_entries: int
    raw_bytes: int


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
    items: tuple[ItemRow, ...]
    """Largest first."""

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
    return ContentsView(
        map=bars(written, "rank", human.size),
        num_writers=sum(1 for count in written if count),
        most=largest[0] if largest else None,
        shards=tuple(largest[:_SHARDS_SHOWN]),
        num_shards=len(shards),
        items=_items(entries),
        entries=tuple(by_size[:_ENTRIES_SHOWN]),
        num_entries=len(entries),
    )


def _items(entries: Sequence[EntryBody]) -> tuple[ItemRow, ...]:
    sizes: dict[str, list[int]] = defaultdict(list)
    for entry in entries:
        sizes[entry.name.partition("/")[0]].append(entry.raw_bytes)
    rows = [ItemRow(name, len(own), sum(own)) for name, own in sizes.items()]
    return tuple(sorted(rows, key=lambda row: (-row.raw_bytes, row.name))[:_SHARDS_SHOWN])
