"""The documents of a checkpoint, as types: receipt, manifest, outcome, lease, tombstone. No I/O.

docs/format.md specifies them. parsing.py reads and writes them.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np
import xxhash

from ckptstore.format.codecs import Buffer
from ckptstore.format.columns import Column

FORMAT = 1
"""Version of everything on the store. A reader refuses newer ones and reads all older ones."""

DIGEST_BYTES = 16
"""Length of a checksum."""

JSON = Any
"""A JSON value: None, bool, int, float, str, list or dict of them."""


def digest(data: Buffer) -> str:
    """xxh3-128 of `data`, as 32 lower-case hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


class Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of everything that is stored as JSON."""


class Chunks(Document, frozen=True, eq=False, omit_defaults=True):
    """The chunks of one shard, as columns. Those that are not referenced lie back to back, in this order, from byte 0
    to the end."""

    raw: Column
    """Bytes before encoding."""
    stored: Column
    """Bytes in the shard."""
    codec: Column
    """Index into codecs."""
    codecs: list[str]
    digest: bytes
    """xxh3-128 of the stored bytes, 16 bytes for each chunk."""
    raw_digest: bytes | None = None
    """xxh3-128 of the bytes before encoding, for whoever saves next; 16 zeros for a chunk of which it is not known."""

    def codec_of(self, chunk: int) -> str:
        """Name of a chunk's codec."""
        return self.codecs[int(self.codec[chunk])]

    def digest_of(self, chunk: int) -> str:
        """A chunk's digest in hexadecimal digits."""
        return self.digest[DIGEST_BYTES * chunk : DIGEST_BYTES * (chunk + 1)].hex()


class References(Document, frozen=True, eq=False):
    """Chunks of a shard that lie in the shard of the same name of earlier checkpoints of the run, as columns."""

    attempts: list[str]
    """Who holds them. They hold them themselves: a reference is never to a reference."""
    chunk: Column
    """Index into the chunks of the shard, rising."""
    attempt: Column
    """Index into attempts."""
    offset: Column
    """Where the stored bytes begin, in the shard of that attempt."""


class Shard(Document, frozen=True, omit_defaults=True):
    """What one rank stored: a file of chunks, and references to chunks of earlier ones."""

    name: str
    rank: int
    chunks: Chunks
    references: References | None = None

    @property
    def referenced_bytes(self) -> int:
        """Stored bytes that lie in earlier checkpoints."""
        return int(self.chunks.stored[self.references.chunk].sum()) if self.references is not None else 0

    @property
    def stored_bytes(self) -> int:
        """Size of the shard's own file; 0: there is none."""
        return int(self.chunks.stored.sum()) - self.referenced_bytes


class Entries(Document, frozen=True):
    """Tensors and arrays, as columns. Names are unique."""

    name: list[str]
    dtype: list[str]
    shape: list[list[int]]


class Slices(Document, frozen=True, eq=False, omit_defaults=True):
    """Where the elements of entries lie, as columns.

    A slice is a row-major box of an entry, at byte `at` of the raw (decoded) stream of a shard.
    """

    entry: Column
    """Index into Entries."""
    shard: Column
    """Index into the manifest's shards; always 0 in a receipt."""
    at: Column
    box: Column
    """All boxes, one after the other: the offsets of one, then its sizes; twice as many numbers as its entry has
    dimensions."""
    derived: Column | None = None
    """The slices, rising, that are not stored: `at` is that of a slice of float32, whose elements they are casts of."""

    @property
    def derived_rows(self) -> Column:
        """The same, empty if there are none."""
        return self.derived if self.derived is not None else np.zeros(0, np.int64)


class Content(Document, frozen=True, eq=False):
    """What a writer, or all of them, stored."""

    shards: list[Shard]
    entries: Entries
    slices: Slices
    aliases: dict[str, str]
    """Further names of an entry (tied weights): alias to entry name."""
    trees: dict[str, JSON]
    """State that belongs to no single rank, by item (model, optim, ...), as tagged JSON (trees.py)."""


class Receipt(Document, frozen=True):
    """A rank's statement that everything it writes is durable."""

    format: int
    kind: Literal["receipt"]
    run: str
    step: int
    attempt: str
    rank: int
    world_size: int
    created_at: float
    content: Content
    local: dict[str, JSON]
    """State that belongs to this rank alone (RNG, data position), as tagged JSON."""
    metrics: dict[str, float]


class LocalState(msgspec.Struct, frozen=True):
    """Of a receipt, what its manifest does not repeat."""

    format: int
    kind: Literal["receipt"]
    local: dict[str, JSON]


class ReceiptRef(Document, frozen=True):
    """A receipt as the manifest names it."""

    rank: int
    digest: str
    bytes: int


class Manifest(Document, frozen=True):
    """All entries, slices and chunks of one checkpoint. A pure function of its receipts."""

    format: int
    kind: Literal["manifest"]
    run: str
    step: int
    attempt: str
    world_size: int
    created_at: float
    receipts: list[ReceiptRef]
    content: Content
    metrics: dict[str, float]


class Summary(Document, frozen=True, omit_defaults=True):
    """What listings show without opening a manifest."""

    world_size: int
    created_at: float
    raw_bytes: int
    stored_bytes: int
    num_entries: int
    num_shards: int
    metrics: dict[str, float]
    referenced_bytes: int = 0
    """Stored bytes that lie in earlier checkpoints, in addition to stored_bytes."""


class Committed(Document, frozen=True):
    """The manifest that a committed attempt consists of."""

    digest: str
    bytes: int
    summary: Summary


class Outcome(Document, frozen=True):
    """The create-only decision about one attempt: committed, or aborted (committed is None)."""

    format: int
    kind: Literal["outcome"]
    run: str
    step: int
    attempt: str
    committed: Committed | None
    nonce: str
    by: str
    at: float


class Lease(Document, frozen=True):
    """A reader's expiring claim on a checkpoint."""

    format: int
    kind: Literal["lease"]
    attempt: str
    holder: str
    expires_at: float


class Tombstone(Document, frozen=True):
    """The statement that a checkpoint is being deleted."""

    format: int
    kind: Literal["tombstone"]
    attempt: str
    by: str
    at: float
    reason: str
    grace_s: float
    """Nothing is deleted before the tombstone, by the store's clock, is so old."""
