"""The documents of a checkpoint, as types: receipt, manifest, outcome, generation, lease, tombstone. No I/O.

docs/explanation/format.md specifies them. parsing.py reads and writes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
import xxhash

from ckptstore.codecs.chunk_codecs import Buffer
from ckptstore.format.columns import Column
from ckptstore.format.decoding import convert
from ckptstore.names import MAX_RANKS, Attempt
from ckptstore.values import Value

_T = TypeVar("_T")

FORMAT = 2
"""Format version of all documents. A reader rejects newer versions and reads all older ones."""

DIGEST_BYTES = 16
"""Length of a checksum in bytes."""

MAX_BYTES = 1 << 62
"""No size or count in a document is larger."""

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]
WorldSize = Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]

JSON = Any
"""A JSON value: None, bool, int, float, str, list or dict of them."""


def digest(data: Buffer) -> str:
    """xxh3-128 of `data`, as 32 lower-case hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def oldest_format(attempt: Attempt) -> int:
    """The format version of a small document about an attempt: 1 in generation 0, so that old clients obey it too.

    Only for documents that are equal in both versions, without extensions: lease, tombstone, sweep decision, labels.
    """
    return FORMAT if attempt.generation else 1


class Document(Value, forbid_unknown_fields=True):
    """Base of all documents that are stored as JSON, and of their parts."""


class _Versioned(Document):
    """The first field of stored documents, before those of each kind and `extensions`."""

    format: int


class StoredDocument(_Versioned, kw_only=True, omit_defaults=True):
    """Base of documents that are objects of their own."""

    extensions: dict[str, JSON] = {}
    """Additions that have no field, by name. A reader refuses names that begin with `critical.` unless it knows them,
    and ignores other names that it does not know."""

    def extension(self, name: str, kind: type[_T]) -> _T | None:
        """An addition as this type; None if there is none, or none that is valid."""
        try:
            return convert(self.extensions.get(name), kind)
        except msgspec.ValidationError:
            return None


class Chunks(Document, eq=False, omit_defaults=True):
    """The chunks of one shard, as columns. Chunks without a reference fill the shard's file, back to back and in this
    order."""

    raw: Column
    """Bytes before encoding."""
    stored: Column
    """Bytes in the shard."""
    codec: Column
    """Index into codecs."""
    codecs: list[str]
    digest: bytes
    """xxh3-128 of the stored bytes, 16 bytes per chunk."""
    raw_digest: bytes | None = None
    """xxh3-128 of the bytes before encoding, 16 bytes per chunk, for the next incremental save; 16 zeros if unknown."""

    def codec_of(self, chunk: int) -> str:
        """Name of a chunk's codec."""
        return self.codecs[int(self.codec[chunk])]

    def digest_of(self, chunk: int) -> str:
        """A chunk's digest in hexadecimal digits."""
        return self.digest[DIGEST_BYTES * chunk : DIGEST_BYTES * (chunk + 1)].hex()

    def raw_digest_of(self, chunk: int) -> bytes:
        """The digest of its bytes before encoding; 16 zeros if unknown."""
        at = DIGEST_BYTES * chunk
        return bytes(DIGEST_BYTES) if self.raw_digest is None else self.raw_digest[at : at + DIGEST_BYTES]


class References(Document, eq=False):
    """Chunks of a shard that are stored in the shard of the same name of earlier checkpoints, as columns."""

    attempts: list[str]
    """The attempts that store the chunks themselves: a reference never points to another reference."""
    chunk: Column
    """Index into the chunks of the shard, ascending."""
    attempt: Column
    """Index into attempts."""
    offset: Column
    """Offset of the stored bytes in the shard of that attempt."""


class Bases(Document, eq=False):
    """The chunks that deltas need: for each delta a whole one, then the deltas between the two, in order of decoding.

    All are stored in the shards of the same name of earlier checkpoints.
    """

    of: Column
    """The chunk of the shard that needs it, ascending."""
    chunks: Chunks
    references: References
    """To all of `chunks`."""


class Shard(Document, omit_defaults=True):
    """The data of one rank: a file of chunks, and references to chunks of earlier checkpoints."""

    name: str
    rank: Rank
    chunks: Chunks
    references: References | None = None
    bases: Bases | None = None

    @property
    def below(self) -> list[Shard]:
        """The bases as a shard without a file, if there are any."""
        found = self.bases
        return [Shard(self.name, self.rank, found.chunks, found.references)] if found is not None else []

    @property
    def needed(self) -> list[str]:
        """The attempts of other checkpoints that store bytes of this one: the referenced ones first."""
        parts = [shard.references for shard in (self, *self.below)]
        return [*dict.fromkeys(attempt for part in parts if part for attempt in part.attempts)]

    @property
    def referenced_bytes(self) -> int:
        """Stored bytes in earlier checkpoints."""
        own = int(self.chunks.stored[self.references.chunk].sum()) if self.references is not None else 0
        return own + sum(shard.referenced_bytes for shard in self.below)

    @property
    def stored_bytes(self) -> int:
        """Size of the shard's own file; 0 if there is no file."""
        needed = sum(int(shard.chunks.stored.sum()) for shard in (self, *self.below))
        return needed - self.referenced_bytes


class Entries(Document):
    """Tensors and arrays, as columns. Names are unique."""

    name: list[str]
    dtype: list[str]
    shape: list[list[int]]

    def rows(self) -> Iterator[tuple[str, str, list[int]]]:
        """Name, type and shape of each."""
        return zip(self.name, self.dtype, self.shape, strict=True)

    def types(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Type and shape of each, by its name."""
        return {name: (dtype, tuple(shape)) for name, dtype, shape in self.rows()}


class Slices(Document, eq=False, omit_defaults=True):
    """The locations of the elements of entries, as columns.

    A slice is a row-major box of an entry, at byte `at` of the raw (decoded) stream of a shard.
    """

    entry: Column
    """Index into Entries."""
    shard: Column
    """Index into the shards of the manifest, or of the receipt."""
    at: Column
    box: Column
    """All boxes in order, each as its offsets, then its sizes: two numbers per dimension of its entry."""
    derived: Column | None = None
    """The slices that are not stored, ascending. Their `at` is that of the float32 slice from which they are cast."""

    @property
    def derived_rows(self) -> Column:
        """`derived`, as an empty column if there are none."""
        return self.derived if self.derived is not None else np.zeros(0, np.int64)


class Content(Document, eq=False):
    """The stored data of one rank, or of all ranks."""

    shards: list[Shard]
    entries: Entries
    slices: Slices
    aliases: dict[str, str]
    """Additional names of entries (tied weights): alias to entry name."""
    trees: dict[str, JSON]
    """State that does not belong to a single rank, by item (model, optim, ...), as tagged JSON (trees.py)."""


class Receipt(StoredDocument):
    """A rank's statement that all its data is durable."""

    kind: Literal["receipt"]
    run: str
    step: int
    attempt: str
    rank: Rank
    world_size: WorldSize
    created_at: float
    content: Content
    local: dict[str, JSON]
    """State of this rank only (RNG, data position), as tagged JSON."""
    metrics: dict[str, float]


class LocalState(Value):
    """The fields of a receipt that the manifest does not repeat."""

    format: int
    kind: Literal["receipt"]
    local: dict[str, JSON]
    extensions: dict[str, JSON] = {}


class ReceiptRef(Document):
    """The manifest's reference to a receipt."""

    rank: Rank
    digest: Digest
    bytes: Count


class Manifest(StoredDocument):
    """All entries, slices and chunks of one checkpoint. A pure function of its receipts."""

    kind: Literal["manifest"]
    run: str
    step: int
    attempt: str
    world_size: WorldSize
    created_at: float
    receipts: list[ReceiptRef]
    content: Content
    metrics: dict[str, float]


class Summary(Document, omit_defaults=True):
    """The facts that listings show without reading a manifest."""

    world_size: WorldSize
    created_at: float
    raw_bytes: Count
    stored_bytes: Count
    num_entries: Count
    num_shards: Count
    metrics: dict[str, float]
    referenced_bytes: Count = 0
    """Stored bytes in earlier checkpoints, in addition to stored_bytes."""


class Committed(Document):
    """The manifest of a committed attempt."""

    digest: Digest
    bytes: Count
    summary: Summary


BASES = "critical.bases"
"""Name of the extension of receipts and manifests in which a shard has bases."""
OPTIMIZER = "critical.optimizer"
"""Name of the extension of receipts and manifests in which a rank has a shard of its own for optimizer state."""
REPLICAS = "replicas"
"""Name of the extension of a receipt about what several ranks hold."""


class Replicas(msgspec.Struct, omit_defaults=True):
    """Digests of state that one rank holds, and others, too."""

    alike: dict[str, str] = {}
    """Texts by name that must be equal on all ranks that have the name."""
    sampled: dict[str, str] = {}
    """The same; the checkpoint has the state of the lowest of these ranks."""


class Outcome(StoredDocument):
    """The create-only decision about one attempt: committed, or aborted (committed is None)."""

    kind: Literal["outcome"]
    run: str
    step: int
    attempt: str
    committed: Committed | None
    nonce: str
    by: str
    at: float


class Generation(StoredDocument):
    """The create-only beginning of a generation: the series of saves of one trainer between two restores."""

    kind: Literal["generation"]
    run: str
    number: int
    """From 1. Generation 0 has no document."""
    session: str
    """A ULID that the ranks of the trainer share."""
    parent: str | None
    """The attempt of an earlier generation from which the trainer resumed; null if of none of this run."""
    by: str
    at: float


class Lease(StoredDocument):
    """A reader's expiring claim on a checkpoint."""

    kind: Literal["lease"]
    attempt: str
    holder: str
    expires_at: float


class Tombstone(StoredDocument):
    """The statement that a checkpoint is being deleted."""

    kind: Literal["tombstone"]
    attempt: str
    by: str
    at: float
    reason: str
    grace_s: float
    """Nothing is deleted before the tombstone has this age, by the store's clock."""
