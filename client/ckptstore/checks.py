"""What must hold in a document beyond the types of its fields, so that nobody who uses one has to doubt it. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from ckptstore import names
from ckptstore.codecs import CODECS, MAX_CHUNK_BYTES
from ckptstore.dtypes import ITEM_BYTES

if TYPE_CHECKING:
    from ckptstore.documents import Committed, Content, Entries, Manifest, Receipt, Shard

_DIGEST = re.compile(r"[0-9a-f]{32}")
_MAX_NAME = 4096
_MAX_DIMENSIONS = 64
_MAX_BYTES = 1 << 62


class Wrong(Exception):
    """A document breaks a rule; says which."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise Wrong(message)


def _same_length(what: str, *columns: Sequence[object]) -> None:
    _require(len({len(column) for column in columns}) == 1, f"columns of {what} differ in length")


def check_receipts(manifest: Manifest) -> None:
    """Every rank has one receipt, and no shard is of a rank outside the world. Raises Wrong or BadInput."""
    receipts, size = manifest.receipts, manifest.world_size
    # The length first: a range of a hostile size does not fit into memory.
    complete = len(receipts) == size and all(receipt.rank == rank for rank, receipt in enumerate(receipts))
    _require(complete, "it does not name one receipt per rank")
    _require(all(_is_digest(receipt.digest) for receipt in receipts), "a receipt's digest is not 32 digits")
    _require(all(0 <= shard.rank < size for shard in manifest.content.shards), "a shard's rank is outside the world")


def check_receipt(receipt: Receipt) -> None:
    """A rank speaks for itself only. Raises Wrong or BadInput."""
    _require(0 <= receipt.rank < receipt.world_size, f"rank {receipt.rank} is outside the world")
    owners = {shard.rank for shard in receipt.content.shards}
    _require(owners <= {receipt.rank}, "a receipt names the shard of another rank")
    check_content(receipt.content)


def check_committed(committed: Committed) -> None:
    """Counts that a listing may show. Raises Wrong or BadInput."""
    summary = committed.summary
    counts = (committed.bytes, summary.raw_bytes, summary.stored_bytes, summary.num_entries, summary.num_shards)
    _require(min(*counts, summary.world_size - 1) >= 0, "a count is out of bounds")
    _require(max(*counts, summary.world_size) <= _MAX_BYTES, "a count is out of bounds")
    _require(_is_digest(committed.digest), "the manifest's digest is not 32 digits")


def check_content(content: Content) -> None:
    """Columns fit each other, and everything that is named exists. Raises Wrong or BadInput."""
    raw_bytes = [_check_shard(shard) for shard in content.shards]
    _require(len({shard.name for shard in content.shards}) == len(content.shards), "two shards of one name")
    sizes = _check_entries(content.entries)
    _check_slices(content, sizes, raw_bytes)
    known = set(content.entries.name)
    for alias, name in content.aliases.items():
        _require(len(alias) <= _MAX_NAME and alias not in known, f"alias {alias[:80]!r} is not allowed")
        _require(name in known, f"alias {alias[:80]!r} names no entry")


def _check_shard(shard: Shard) -> int:
    """Raw bytes of the shard."""
    chunks = shard.chunks
    names.check_shard(shard.name)
    _same_length("chunks", chunks.raw, chunks.stored, chunks.codec, chunks.digest)
    _require(all(0 < size <= MAX_CHUNK_BYTES for size in chunks.raw), "a chunk's raw size is out of bounds")
    _require(all(0 < size <= MAX_CHUNK_BYTES for size in chunks.stored), "a chunk's size is out of bounds")
    _require(set(chunks.codec) <= set(CODECS), "a chunk's codec is unknown")
    _require(all(map(_is_digest, chunks.digest)), "a chunk's digest is not 32 digits")
    return sum(chunks.raw)


def _is_digest(text: str) -> bool:
    return _DIGEST.fullmatch(text) is not None


def _check_entries(entries: Entries) -> list[int]:
    """Bytes of each entry."""
    _same_length("entries", entries.name, entries.dtype, entries.shape)
    _require(len(set(entries.name)) == len(entries.name), "two entries of one name")
    _require(all(0 < len(name) <= _MAX_NAME for name in entries.name), "an entry's name is empty or too long")
    _require(set(entries.dtype) <= ITEM_BYTES.keys(), "an entry's dtype is unknown")
    _require(all(len(shape) <= _MAX_DIMENSIONS for shape in entries.shape), "an entry has too many dimensions")
    _require(
        all(0 <= size <= _MAX_BYTES for shape in entries.shape for size in shape),
        "a dimension is out of bounds",
    )
    sizes = [prod(s) * ITEM_BYTES[d] for s, d in zip(entries.shape, entries.dtype, strict=True)]
    _require(all(size <= _MAX_BYTES for size in sizes), "an entry's size is out of bounds")
    return sizes


def _check_slices(content: Content, entry_bytes: list[int], shard_bytes: list[int]) -> None:
    slices, entries = content.slices, content.entries
    _same_length("slices", slices.entry, slices.shard, slices.at, slices.box)
    _require(all(0 <= index < len(entry_bytes) for index in slices.entry), "a slice names no entry")
    _require(all(0 <= index < len(shard_bytes) for index in slices.shard), "a slice names no shard")
    for entry, shard, at, box in zip(slices.entry, slices.shard, slices.at, slices.box, strict=True):
        size = entry_bytes[entry]
        if box is not None:
            shape = entries.shape[entry]
            rank = len(shape)
            _require(len(box) == 2 * rank, "a box has a wrong shape")
            for offset, length, limit in zip(box, box[rank:], shape, strict=False):
                if not (0 <= offset <= limit and 0 <= length <= limit - offset):
                    raise Wrong("a box leaves its entry")
            size = prod(box[rank:]) * ITEM_BYTES[entries.dtype[entry]]
        if not 0 <= at <= shard_bytes[shard] - size:
            raise Wrong("a slice leaves its shard")
