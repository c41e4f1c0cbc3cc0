"""The manifest of an attempt, made of the receipts of all ranks. Pure.

The same receipts give the same manifest in every process. All work for one receipt is done when
it has been read: while receipts are still missing, the merging process has time (docs/decisions/0041).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np
from msgspec import Raw

from ckptstore.errors import CorruptObject, UnsupportedObject
from ckptstore.format.boxes import check_cover
from ckptstore.format.columns import Column, column, concatenate
from ckptstore.format.documents import (
    FORMAT,
    JSON,
    REPLICAS,
    Content,
    Entries,
    Manifest,
    Receipt,
    ReceiptRef,
    Replicas,
    Shard,
    Slices,
    digest,
)
from ckptstore.format.parsing import check_content, check_receipt, check_together, encode_shard
from ckptstore.format.trees import leaves, merge_trees
from ckptstore.names import is_optimizer_shard, of_optimizer


class StoredReceipt(NamedTuple):
    """A durable receipt whose content is valid, and what its manifest needs beside it."""

    receipt: Receipt
    ref: ReceiptRef
    shards: Sequence[Raw]
    """Its shards as they are in the manifest."""

    @staticmethod
    def of(receipt: Receipt, data: bytes) -> StoredReceipt:
        """The receipt that is stored as `data`. Raises CorruptObject if it is not valid."""
        ref = ReceiptRef(rank=receipt.rank, digest=digest(data), bytes=len(data))
        [stored] = checked([(receipt, ref)])
        return stored


def checked(parsed: Sequence[tuple[Receipt, ReceiptRef]]) -> list[StoredReceipt]:
    """Receipts of one attempt from `parse_part`. Their contents are checked together: a fraction of the time.

    Raises CorruptObject if one of them is not valid.
    """
    try:
        content = _merge_content([receipt.content for receipt, _ in parsed])
        for receipt, _ in parsed[:1]:
            check_content(receipt.attempt, content, "the receipts")
    except CorruptObject:
        for receipt, _ in parsed:  # which one?
            check_receipt(receipt, f"the receipt of rank {receipt.rank} of attempt {receipt.attempt}")
        raise
    return [StoredReceipt(receipt, ref, [*map(encode_shard, receipt.content.shards)]) for receipt, ref in parsed]


def merge(receipts: Sequence[StoredReceipt]) -> Manifest:
    """The manifest of an attempt, from the receipts of all ranks in rank order. Pure.

    Raises CorruptObject if the receipts do not belong together, UnsupportedObject if state would be lost.
    """
    first = receipts[0].receipt
    for rank, stored in enumerate(receipts):
        receipt = stored.receipt
        same = (receipt.run, receipt.attempt, receipt.world_size, receipt.rank)
        if same != (first.run, first.attempt, len(receipts), rank):
            raise CorruptObject(f"receipt {rank} of attempt {first.attempt} does not fit the others: {same}")
    manifest = Manifest(
        format=FORMAT,
        kind="manifest",
        run=first.run,
        step=first.step,
        attempt=first.attempt,
        world_size=first.world_size,
        created_at=first.created_at,
        receipts=[stored.ref for stored in receipts],
        content=_merge_content([stored.receipt.content for stored in receipts]),
        metrics=first.metrics,
        extensions={name: value for stored in reversed(receipts) for name, value in stored.receipt.extensions.items()},
    )
    # A manifest that readers would reject must not be committed.
    check_together(manifest, f"the manifest of attempt {first.attempt}")
    check_cover(manifest.content)
    _check_alike(receipts)
    _check_trees(manifest.content)
    return manifest


def without_optimizer(content: Content) -> Content:
    """The content of a thinned checkpoint: no entry with a part in an optimizer shard, no optimizer's tree. Pure."""
    entries, slices = content.entries, content.slices
    kept = np.array([not is_optimizer_shard(shard.name) for shard in content.shards], np.bool_)
    left = np.ones(len(entries.name), np.bool_)
    left[slices.entry[~kept[slices.shard]]] = False
    rows, derived = left[slices.entry], slices.derived_rows
    derived = (np.cumsum(rows) - 1)[derived[rows[derived]]]
    names = [*compress(entries.name, left)]
    return Content(
        shards=[*compress(content.shards, kept)],
        entries=Entries(names, [*compress(entries.dtype, left)], [*compress(entries.shape, left)]),
        slices=Slices(
            entry=(np.cumsum(left) - 1)[slices.entry[rows]],
            shard=(np.cumsum(kept) - 1)[slices.shard[rows]],
            at=slices.at[rows],
            box=slices.box[np.repeat(rows, 2 * column(map(len, entries.shape))[slices.entry])],
            derived=derived if len(derived) else None,
        ),
        aliases={alias: name for alias, name in content.aliases.items() if name in names},
        trees={item: tree for item, tree in content.trees.items() if not of_optimizer(item)},
    )


def _check_alike(receipts: Sequence[StoredReceipt]) -> None:
    """Raises UnsupportedObject if ranks hold different state that must be equal."""
    if problem := difference(replicas(stored).alike for stored in receipts):
        raise UnsupportedObject(
            f"{problem}. State would be lost",
            "Nothing was committed. Keep optimizer state of sharded parameters as DTensor like the parameter, step all "
            "optimizers of one item on the same ranks, pass the same shared= on all, and state of one rank as an extra",
        )


def replicas(stored: StoredReceipt) -> Replicas:
    """The digests that a rank gives of state that others hold, too."""
    return stored.receipt.extension(REPLICAS, Replicas) or Replicas()


def difference(said: Iterable[Mapping[str, str]]) -> str:
    """The first name that two ranks have different texts for, in words. said: texts by name, of each rank."""
    known: dict[str, tuple[int, str]] = {}
    for rank, texts in enumerate(said):
        for name, text in texts.items():
            first, other = known.setdefault(name, (rank, text))
            if text != other:
                return f"ranks {first} and {rank} hold different {name!r}: {other} and {text}"
    return ""


def _merge_content(contents: Sequence[Content]) -> Content:
    shards: list[Shard] = []
    entries = Entries(name=[], dtype=[], shape=[])
    columns: list[tuple[Column, ...]] = [(column(),) * 4]
    aliases: dict[str, str] = {}
    trees: dict[str, list[JSON]] = {}
    index: dict[str, int] = {}
    places: dict[int, Column] = {}
    """By the id of entries, which many ranks share: the places of these entries in those of the manifest."""
    derived: list[Column] = []
    rows = 0
    for content in contents:
        if id(content.entries) not in places:
            places[id(content.entries)] = _add_entries(entries, index, content.entries)
        slices = content.slices
        entry = places[id(content.entries)][slices.entry]
        columns.append((entry, slices.shard + len(shards), slices.at, slices.box))
        if slices.derived is not None:
            derived.append(slices.derived + rows)
        rows += len(slices.entry)
        shards.extend(content.shards)
        for alias, name in content.aliases.items():
            if aliases.setdefault(alias, name) != name:
                raise CorruptObject(f"two ranks have different targets of alias {alias!r}")
        for item, tree in content.trees.items():
            trees.setdefault(item, []).append(tree)
    entry, shard, at, box = map(np.concatenate, zip(*columns, strict=True))
    slices = Slices(entry, shard, at, box, concatenate(derived) if derived else None)
    merged = {item: _merge_all(found, item) for item, found in trees.items()}
    return Content(shards=shards, entries=entries, slices=slices, aliases=aliases, trees=merged)


def _add_entries(entries: Entries, index: dict[str, int], added: Entries) -> Column:
    """Add the entries of a rank that are new; returns the places of all of its entries. index: place by name."""
    for name, dtype, shape in added.rows():
        at = index.setdefault(name, len(index))
        if at == len(entries.name):
            entries.name.append(name)
            entries.dtype.append(dtype)
            entries.shape.append(shape)
        elif (entries.dtype[at], entries.shape[at]) != (dtype, shape):
            raise CorruptObject(f"two ranks have different types or shapes of entry {name!r}")
    return column(index[name] for name in added.name)


def _merge_all(trees: list[JSON], item: str) -> JSON:
    """The trees of all ranks as one. A merge copies both: one rank after the other would be quadratic in the ranks."""
    half = len(trees) // 2
    if not half:
        return trees[0]
    return merge_trees(_merge_all(trees[:half], item), _merge_all(trees[half:], item), item)


def _check_trees(content: Content) -> None:
    """Raises CorruptObject if a tensor of a tree is not an entry: every rank left it to another one."""
    known = set(content.entries.name)
    for item, tree in content.trees.items():
        for path, leaf in leaves(tree, item):
            if "name" in leaf and leaf["name"] not in known:
                raise CorruptObject(f"no rank wrote {path!r}", "Nothing was committed; please report this")
