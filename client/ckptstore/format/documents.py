"""The documents of a checkpoint: receipt, manifest, outcome, lease, tombstone. Typed, strict, bounded. No I/O.

Small documents are sealed: a line of JSON, then a line holding its checksum. A manifest is
zstd-compressed JSON whose checksum stands in the outcome. Documents are hostile input: nothing
in them is believed before `parse_*` has checked it. docs/format.md specifies them.
"""

from __future__ import annotations

from math import isfinite
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import xxhash
import zstandard

from ckptstore import names
from ckptstore.errors import BadInput, CorruptObject, InvalidRequest, UnsupportedFormat
from ckptstore.format import checks
from ckptstore.format.codecs import Buffer
from ckptstore.format.columns import Column, decode_hook, encode_hook
from ckptstore.format.decoding import decode_json

FORMAT = 1
"""Version of everything on the store. A reader refuses newer ones and reads all older ones."""

DIGEST_BYTES = 16
"""Length of a checksum."""

MAX_SEALED_BYTES = 256 << 20
MAX_MANIFEST_BYTES = 4 << 30
# More is a bomb. Slices alike on a thousand ranks were seen to compress 120-fold.
_BOMB_FLOOR = 256 << 20
_BOMB_RATIO = 1000

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


_D = TypeVar("_D", bound=Document)
_S = TypeVar("_S", bound=msgspec.Struct)


class _Version(msgspec.Struct):
    format: int


def seal(document: Document) -> bytes:
    """Two lines: the document as JSON, and the checksum of that line's bytes.

    Raises InvalidRequest if a metric is not finite: JSON would turn it into null, which no reader takes.
    """
    if isinstance(document, Receipt) and not all(map(isfinite, document.metrics.values())):
        raise InvalidRequest(f"metrics {document.metrics} are not all finite", "Leave out nan and inf")
    body = msgspec.json.encode(document, enc_hook=encode_hook)
    return body + _trailer(body)


def parse_sealed(data: bytes, kind: type[_D], key: str) -> _D:
    """The document in `data`, read from `key`, if every byte of it is as sealed and every field makes sense.

    Raises CorruptObject or UnsupportedFormat.
    """
    if len(data) > MAX_SEALED_BYTES:
        raise CorruptObject(f"{key} is larger than {MAX_SEALED_BYTES} bytes")
    end = data.find(b"\n")
    body = data[:end] if end >= 0 else data
    if data != body + _trailer(body):
        raise CorruptObject(f"{key} does not match its checksum")
    document = _decode(body, kind, key)
    _check_names(document, key)
    if isinstance(document, Receipt):
        _checked(key, checks.check_receipt, document)
    if isinstance(document, Outcome) and document.committed is not None:
        _checked(key, checks.check_committed, document.committed)
    return document


def parse_local(data: bytes, key: str) -> dict[str, JSON]:
    """What belongs to its rank alone in the receipt in `data`, whose bytes are known to be those of a sound one.

    All else in it stands in the manifest, too: half the work. Raises CorruptObject or UnsupportedFormat.
    """
    return _decode(data[: data.find(b"\n")], LocalState, key).local


def pack_manifest(manifest: Manifest) -> bytes:
    """The manifest as it is stored."""
    return zstandard.ZstdCompressor(level=3, write_checksum=True).compress(manifest_bytes(manifest))


def manifest_bytes(manifest: Manifest) -> bytes:
    """The canonical JSON of a manifest: equal receipts give equal bytes."""
    return msgspec.json.encode(manifest, enc_hook=encode_hook)


def parse_manifest(data: bytes, key: str, expected: str | None = None) -> Manifest:
    """The manifest in `data`, read from `key`; `expected` is the checksum of `data` in the outcome.

    Raises CorruptObject or UnsupportedFormat.
    """
    if expected is not None and digest(data) != expected:
        raise CorruptObject(f"{key} does not match the checksum in its outcome")
    try:
        size = zstandard.get_frame_parameters(data).content_size
        if not 0 <= size <= min(MAX_MANIFEST_BYTES, _BOMB_FLOOR + _BOMB_RATIO * len(data)):
            raise CorruptObject(f"{key} claims to unpack to {size} bytes")
        body = zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptObject(f"{key} cannot be decompressed: {error}") from error
    manifest = _decode(body, Manifest, key)
    check_manifest(manifest, key)
    return manifest


def check_manifest(manifest: Manifest, key: str) -> None:
    """CorruptObject unless every field of the manifest makes sense."""
    _check_names(manifest, key)
    _checked(key, checks.check_receipts, manifest)
    _checked(key, checks.check_content, manifest.content)
    _checked(key, checks.check_aliases, manifest.content)
    _checked(key, checks.check_references, manifest.attempt, manifest.content)


def _trailer(body: bytes) -> bytes:
    return b'\n{"xxh3_128":"' + digest(body).encode() + b'"}\n'


def _decode(body: bytes, kind: type[_S], key: str) -> _S:
    try:
        version = decode_json(body, _Version).format
        if version < 1:
            raise CorruptObject(f"{key} has format version {version}")
        if version > FORMAT:
            raise UnsupportedFormat(
                f"{key} has format version {version}, this program reads up to {FORMAT}", "Upgrade ckptd"
            )
        return decode_json(body, kind, decode_hook)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptObject(f"{key} is not a valid {kind.__name__.lower()}: {error}") from error


def _check_names(document: Document, key: str) -> None:
    if not hasattr(document, "attempt"):
        return
    try:
        attempt = names.Attempt.parse(document.attempt)
        if isinstance(document, Receipt | Manifest | Outcome):
            names.check_run(document.run)
            if document.step != attempt.step:
                raise CorruptObject(f"{key}: step {document.step} is not that of attempt {attempt}")
    except BadInput as error:
        raise CorruptObject(f"{key}: {error.message}") from error


def _checked(key: str, check: Any, *args: Any) -> None:
    try:
        check(*args)
    except (checks.Wrong, BadInput) as error:
        raise CorruptObject(f"{key}: {error}") from error
