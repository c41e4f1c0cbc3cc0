"""Validation of documents beyond the types of their fields, so that other code can rely on them. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence, Sized
from itertools import chain, pairwise
from math import prod
from operator import mul
from typing import TYPE_CHECKING

import numpy as np

from ckptstore import names
from ckptstore.codecs.casting import CAST_TYPES, SOURCE
from ckptstore.codecs.chunk_codecs import CODECS, MAX_CHUNK_BYTES
from ckptstore.codecs.dtypes import ITEM_BYTES
from ckptstore.format.boxes import BLOCK, MAX_DIMENSIONS, same_dimensions
from ckptstore.format.columns import Column, column, concatenate, distinct

if TYPE_CHECKING:
    from ckptstore.format.documents import Committed, Content, Entries, Generation, Manifest, Receipt, Shard
    from ckptstore.format.records import DeadList

_DIGEST = re.compile(r"[0-9a-f]{32}")
_DIGEST_BYTES = 16
_MAX_NAME = 4096
_MAX_BYTES = 1 << 62


class Invalid(Exception):
    """A document breaks a rule, which the message states."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise Invalid(message)


def _same_length(what: str, *columns: Sized) -> None:
    _require(len({len(column) for column in columns}) == 1, f"columns of {what} differ in length")


def check_receipts(manifest: Manifest) -> None:
    """Every rank has one receipt, and every shard belongs to one of the ranks. Raises Invalid or BadInput."""
    receipts, size = manifest.receipts, manifest.world_size
    # Compare lengths first: a range of a hostile size does not fit into memory.
    complete = len(receipts) == size and all(receipt.rank == rank for rank, receipt in enumerate(receipts))
    _require(complete, "it does not name one receipt per rank")
    _require(all(_is_digest(receipt.digest) for receipt in receipts), "a receipt's digest is not 32 digits")
    _require(all(0 <= shard.rank < size for shard in manifest.content.shards), "a shard's rank is outside the world")


def check_receipt(receipt: Receipt) -> None:
    """A receipt describes only its own rank. Raises Invalid or BadInput."""
    _check_rank(receipt)
    check_content(receipt.content)
    check_references(receipt.attempt, receipt.content)


def check_part(receipt: Receipt) -> None:
    """Everything in a receipt refers to its own rows: then a check of many merged contents is a check of each.

    A tenth of the time of check_receipt. Raises Invalid or BadInput.
    """
    _check_rank(receipt)
    _check_rows(receipt.content)


def _check_rank(receipt: Receipt) -> None:
    _require(receipt.world_size <= names.MAX_RANKS, f"the world has {receipt.world_size} ranks")
    _require(0 <= receipt.rank < receipt.world_size, f"rank {receipt.rank} is outside the world")
    owners = {shard.rank for shard in receipt.content.shards}
    _require(owners <= {receipt.rank}, "a receipt names the shard of another rank")


def check_committed(committed: Committed) -> None:
    """The counts that listings show are within bounds. Raises Invalid or BadInput."""
    summary = committed.summary
    sizes = (committed.bytes, summary.raw_bytes, summary.stored_bytes, summary.referenced_bytes)
    counts = (*sizes, summary.num_entries, summary.num_shards)
    _require(min(*counts, summary.world_size - 1) >= 0, "a count is out of bounds")
    _require(max(counts) <= _MAX_BYTES, "a count is out of bounds")
    _require(summary.world_size <= names.MAX_RANKS, f"the world has {summary.world_size} ranks")
    _require(_is_digest(committed.digest), "the manifest's digest is not 32 digits")


def check_generation(generation: Generation) -> None:
    """Its parent is of an earlier generation. Raises Invalid or BadInput."""
    names.check_run(generation.run)
    names.check_ulid(generation.session)
    _require(names.check_generation(generation.number) > 0, "generation 0 has no document")
    if generation.parent is not None:
        parent = names.Attempt.parse(generation.parent)
        _require(parent.generation < generation.number, "the parent is not of an earlier generation")


def check_dead(dead: DeadList) -> None:
    """It names different attempts of its generation, in order. Raises Invalid or BadInput."""
    names.check_generation(dead.generation)
    _require(0 < dead.version < 10**8, "the version is out of bounds")
    _require(all(a < b for a, b in pairwise(dead.attempts)), "the attempts are not in order")
    known = map(names.Attempt.parse, dead.attempts)
    _require(all(attempt.generation == dead.generation for attempt in known), "an attempt is of another generation")


def check_content(content: Content) -> None:
    """Columns match in length, and all names and indices refer to something. Raises Invalid or BadInput."""
    check_shard_names(content)
    _check_chunks(content.shards)
    _check_entries(content.entries)
    _check_rows(content)
    _check_slices(content)
    _require(all(len(alias) <= _MAX_NAME for alias in content.aliases), "an alias is too long")


def check_shard_names(content: Content) -> None:
    """No two ranks wrote the same shard. Raises Invalid."""
    _require(len({shard.name for shard in content.shards}) == len(content.shards), "two shards of one name")


def check_aliases(content: Content) -> None:
    """All aliases of a checkpoint name entries, possibly of another rank. Raises Invalid."""
    known = set(content.entries.name)
    for alias, name in content.aliases.items():
        _require(alias not in known, f"alias {alias[:80]!r} is not allowed")
        _require(name in known, f"alias {alias[:80]!r} names no entry")


def check_references(attempt: str, content: Content) -> None:
    """References point to other attempts, at most one per chunk. Raises Invalid or BadInput."""
    for shard in content.shards:
        found = shard.references
        if found is None:
            continue
        _same_length("references", found.chunk, found.attempt, found.offset)
        for other in found.attempts:
            names.Attempt.parse(other)
        _require(len({*found.attempts, attempt}) == len(found.attempts) + 1, "a reference to itself, or twice to one")
        _require(bool((np.diff(found.chunk) > 0).all()), "references are not in order")
        _require(int(found.chunk.max(initial=-1)) < len(shard.chunks.raw), "a reference is to no chunk")
        used = distinct(found.attempt)
        _require(bool(len(used)) and used.tolist() == list(range(len(found.attempts))), "an attempt is not referenced")
        _require(int(found.offset.max(initial=0)) <= _MAX_BYTES, "a reference is out of bounds")


def _check_chunks(shards: Sequence[Shard]) -> None:
    for shard in shards:
        chunks = shard.chunks
        names.check_shard(shard.name)
        _same_length("chunks", chunks.raw, chunks.stored, chunks.codec)
        _require(len(chunks.digest) == _DIGEST_BYTES * len(chunks.raw), "a chunk has no digest")
        known = chunks.raw_digest
        _require(known is None or len(known) == len(chunks.digest), "raw digests and chunks differ in number")
        _require(len(set(chunks.codecs)) == len(chunks.codecs) <= len(CODECS), "codecs are named twice")
        _require(set(chunks.codecs) <= set(CODECS), "a chunk's codec is unknown")
        _require(int(chunks.codec.max(initial=-1)) < len(chunks.codecs), "a chunk names no codec")
    raw = concatenate(shard.chunks.raw for shard in shards)
    stored = concatenate(shard.chunks.stored for shard in shards)
    _require(bool(((raw > 0) & (raw <= MAX_CHUNK_BYTES)).all()), "a chunk's raw size is out of bounds")
    _require(bool(((stored > 0) & (stored <= MAX_CHUNK_BYTES)).all()), "a chunk's size is out of bounds")


def _is_digest(text: str) -> bool:
    return _DIGEST.fullmatch(text) is not None


def _check_entries(entries: Entries) -> None:
    _same_length("entries", entries.name, entries.dtype, entries.shape)
    _require(len(set(entries.name)) == len(entries.name), "two entries of one name")
    lengths = {1, *map(len, entries.name)}
    _require(min(lengths) > 0 and max(lengths) <= _MAX_NAME, "an entry's name is empty or too long")
    _require(set(entries.dtype) <= ITEM_BYTES.keys(), "an entry's dtype is unknown")
    _require(max(map(len, entries.shape), default=0) <= MAX_DIMENSIONS, "an entry has too many dimensions")
    dimensions = set(chain.from_iterable(entries.shape))
    in_bounds = min(dimensions, default=0) >= 0 and max(dimensions, default=0) <= _MAX_BYTES
    _require(in_bounds, "a dimension is out of bounds")
    sizes = map(mul, map(prod, entries.shape), map(ITEM_BYTES.__getitem__, entries.dtype))
    _require(max(sizes, default=0) <= _MAX_BYTES, "an entry's size is out of bounds")


def _check_rows(content: Content) -> None:
    """Columns match in length, and indices of rows are within the content."""
    slices, entries = content.slices, content.entries
    _same_length("entries", entries.name, entries.dtype, entries.shape)
    _same_length("slices", slices.entry, slices.shard, slices.at)
    _require(int(slices.entry.max(initial=-1)) < len(entries.name), "a slice names no entry")
    _require(int(slices.shard.max(initial=-1)) < len(content.shards), "a slice names no shard")
    _require(int(slices.derived_rows.max(initial=-1)) < len(slices.entry), "a derived slice is none")
    dimensions = column(map(len, entries.shape))[slices.entry]
    _require(len(slices.box) == 2 * int(dimensions.sum()), "boxes and slices differ in number")


def _check_slices(content: Content) -> None:
    slices = content.slices
    ends = np.cumsum(column(len(shard.chunks.raw) for shard in content.shards))
    streams = np.cumsum(concatenate(shard.chunks.raw for shard in content.shards))
    shard_bytes = np.diff(np.append(0, streams)[np.append(0, ends)])
    is_derived = np.zeros(len(slices.entry), np.bool_)
    if slices.derived is not None:
        _require(bool(len(slices.derived) and (np.diff(slices.derived) > 0).all()), "derived slices are not in order")
        is_derived[slices.derived] = True
    sizes = np.zeros(len(slices.entry), np.int64)
    for group in same_dimensions(content, np.arange(len(slices.entry)), BLOCK):
        inside = (group.offsets <= group.shapes) & (group.sizes <= group.shapes - group.offsets)
        _require(bool(inside.all()), "a box leaves its entry")
        sizes[group.rows] = group.bytes
        room = shard_bytes[slices.shard[group.rows]] - group.bytes
        fits = (slices.at[group.rows] <= room) | is_derived[group.rows]
        _require(bool(fits.all()), "a slice leaves its shard")
    stored = np.flatnonzero(~is_derived)
    _require(_apart(slices.shard[stored], slices.at[stored], sizes[stored]), "two slices share bytes of a shard")
    _check_derived(content, sizes, stored)


def _check_derived(content: Content, sizes: Column, stored: Column) -> None:
    """Each derived slice has its own source: a stored float32 slice with the same number of elements."""
    slices, dtypes = content.slices, content.entries.dtype
    if slices.derived is None:
        return
    wanted = set(zip(slices.shard[slices.derived].tolist(), slices.at[slices.derived].tolist(), strict=True))
    near = stored[np.isin(slices.at[stored], slices.at[slices.derived]) & (sizes[stored] > 0)].tolist()
    sources = {
        place: row for row in near if (place := (int(slices.shard[row]), int(slices.at[row]))) in wanted
    }  # fmt: skip
    _require(len(wanted) == len(slices.derived), "two slices are derived from one")
    for row in slices.derived.tolist():
        source = sources.get((int(slices.shard[row]), int(slices.at[row])))
        _require(source is not None, "a slice is derived from none")
        assert source is not None
        types = dtypes[int(slices.entry[source])], dtypes[int(slices.entry[row])]
        _require(types[0] == SOURCE and types[1] in CAST_TYPES, "a slice is derived from one of another type")
        _require(int(sizes[source]) == 2 * int(sizes[row]), "a slice is derived from one of another size")


def _apart(shard: Column, at: Column, sizes: Column) -> bool:
    """Whether no two slices share a byte. Otherwise a small manifest could expand into a plan of any size."""
    if not bool((sizes > 0).all()):
        shard, at, sizes = shard[sizes > 0], at[sizes > 0], sizes[sizes > 0]
    if not bool((shard[1:] >= shard[:-1]).all() and ((at[1:] > at[:-1]) | (shard[1:] > shard[:-1])).all()):
        order = np.lexsort((at, shard))
        shard, at, sizes = shard[order], at[order], sizes[order]
    return bool(((shard[1:] != shard[:-1]) | (at[1:] >= at[:-1] + sizes[:-1])).all())
