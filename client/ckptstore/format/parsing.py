"""Encoding and strict, bounded parsing of documents. No I/O.

A small document is sealed: a line of JSON, then a line with its checksum. A manifest is zstd-compressed JSON whose
checksum is in the outcome. Documents are untrusted input: `parse_*` checks every field before it returns one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager
from itertools import chain, pairwise
from math import isfinite, prod
from operator import mul
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
import zstandard

from ckptstore import names
from ckptstore.codecs.chunk_codecs import CODECS, MAX_CHUNK_BYTES
from ckptstore.codecs.delta import DELTA
from ckptstore.codecs.dtypes import CAST_TYPES, ITEM_BYTES, SOURCE
from ckptstore.errors import BadInput, CorruptObject, InvalidRequest, UnsupportedFormat
from ckptstore.format.boxes import BLOCK, MAX_DIMENSIONS, same_dimensions
from ckptstore.format.columns import Column, column, concatenate, decode_hook, distinct, encode_hook
from ckptstore.format.decoding import decode_json
from ckptstore.format.documents import (
    BASES,
    DIGEST_BYTES,
    FORMAT,
    JSON,
    MAX_BYTES,
    OPTIMIZER,
    Chunks,
    Content,
    Document,
    Entries,
    Generation,
    LocalState,
    Manifest,
    Outcome,
    Receipt,
    Shard,
    digest,
)
from ckptstore.format.records import DeletedList, Heartbeat

MAX_SEALED_BYTES = 256 << 20
MAX_MANIFEST_BYTES = 4 << 30
# More is a decompression bomb. Equal slices on a thousand ranks compressed 120-fold.
_BOMB_FLOOR = 256 << 20
_BOMB_RATIO = 1000
_MAX_NAME = 4096

_D = TypeVar("_D", bound=Document)
_S = TypeVar("_S", bound=msgspec.Struct)


class _Head(msgspec.Struct):
    """The fields that decide whether this program understands a document, whatever the others are."""

    format: int
    extensions: dict[str, JSON] = {}


_CRITICAL = "critical."
"""Begins the names of extensions that a reader must know."""
_KNOWN = frozenset({BASES, OPTIMIZER})


def seal(document: Document) -> bytes:
    """Two lines: the document as JSON, and the checksum of that line's bytes.

    Raises InvalidRequest if a metric is not finite: JSON would encode it as null, which readers reject.
    """
    if isinstance(document, Receipt) and not all(map(isfinite, document.metrics.values())):
        raise InvalidRequest(f"metrics {document.metrics} are not all finite", "Omit nan and inf")
    body = msgspec.json.encode(document, enc_hook=encode_hook)
    return body + _trailer(body)


def is_sealed(data: bytes) -> bool:
    """Whether the bytes are a document that matches its checksum."""
    body = data[: data.find(b"\n")]
    return data == body + _trailer(body)


def parse_sealed(data: bytes, kind: type[_D], key: str) -> _D:
    """Parse the document in `data`, read from `key`; verifies its checksum and all fields.

    Raises CorruptObject or UnsupportedFormat.
    """
    document = _open_sealed(data, kind, key)
    with _checking(key):
        match document:
            case Receipt():
                check_receipt(document, key)
            case Generation():
                _check_generation(document)
            case DeletedList():
                _check_deleted(document)
            case Heartbeat():
                _same_length("beats", document.at, document.step, document.stalled_s, document.slowed_s)
                if document.parent is not None:
                    names.Attempt.parse(document.parent)
    return document


def parse_part(data: bytes, key: str) -> Receipt:
    """Parse the receipt in `data`, read from `key`, for a merge, which checks the contents of many together.

    Everything in it refers to its own rows: then a check of many merged contents is a check of each, in a tenth of the
    time. Raises CorruptObject or UnsupportedFormat.
    """
    receipt = _open_sealed(data, Receipt, key)
    with _checking(key):
        _check_rank(receipt)
        _check_rows(receipt.content)
    return receipt


def check_receipt(receipt: Receipt, key: str) -> None:
    """Raises CorruptObject unless every field of the receipt is valid, and about its own rank."""
    with _checking(key):
        _check_rank(receipt)
        check_content(receipt.attempt, receipt.content, key)


def _open_sealed(data: bytes, kind: type[_D], key: str) -> _D:
    if len(data) > MAX_SEALED_BYTES:
        raise CorruptObject(f"{key} is larger than {MAX_SEALED_BYTES} bytes")
    if not is_sealed(data):
        raise CorruptObject(f"{key} does not match its checksum")
    document = _decode(data[: data.find(b"\n")], kind, key)
    _check_names(document, key)
    return document


def parse_local(data: bytes, key: str) -> dict[str, JSON]:
    """The state of one rank in the receipt in `data`, whose bytes have been verified.

    Skips the other fields, which the manifest repeats: half the work. Raises CorruptObject or UnsupportedFormat.
    """
    return _decode(data[: data.find(b"\n")], LocalState, key).local


def encode_shard(shard: Shard) -> msgspec.Raw:
    """The canonical JSON of a shard, as it is in the manifest."""
    return msgspec.Raw(msgspec.json.encode(shard, enc_hook=encode_hook))


def pack_manifest(manifest: Manifest, shards: Sequence[msgspec.Raw] | None = None) -> bytes:
    """The stored form of the manifest. shards: see manifest_bytes."""
    return zstandard.ZstdCompressor(level=3, write_checksum=True).compress(manifest_bytes(manifest, shards))


def manifest_bytes(manifest: Manifest, shards: Sequence[msgspec.Raw] | None = None) -> bytes:
    """The canonical JSON of a manifest: equal receipts give equal bytes. shards: they are encoded already."""
    if shards is not None:
        content = msgspec.structs.replace(manifest.content, shards=shards)
        manifest = msgspec.structs.replace(manifest, content=content)
    return msgspec.json.encode(manifest, enc_hook=encode_hook)


def parse_manifest(data: bytes, key: str, expected: str | None = None) -> Manifest:
    """Parse the manifest in `data`, read from `key`; `expected` is the checksum of `data` in the outcome.

    Raises CorruptObject or UnsupportedFormat.
    """
    if expected is not None and digest(data) != expected:
        raise CorruptObject(f"{key} does not match the checksum in its outcome")
    try:
        size = zstandard.get_frame_parameters(data).content_size
        if not 0 <= size <= min(MAX_MANIFEST_BYTES, _BOMB_FLOOR + _BOMB_RATIO * len(data)):
            raise CorruptObject(f"{key} claims to decompress to {size} bytes")
        body = zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptObject(f"{key} cannot be decompressed: {error}") from error
    manifest = _decode(body, Manifest, key)
    check_manifest(manifest, key)
    return manifest


def check_manifest(manifest: Manifest, key: str) -> None:
    """Raises CorruptObject unless every field of the manifest is valid."""
    check_together(manifest, key)
    check_content(manifest.attempt, manifest.content, key)


def check_together(manifest: Manifest, key: str) -> None:
    """Raises CorruptObject unless the contents of all ranks, each of which is valid, are so together."""
    _check_names(manifest, key)
    receipts, size, content = manifest.receipts, manifest.world_size, manifest.content
    with _checking(key):
        # Compare lengths first: a range of a hostile size does not fit into memory.
        _check_announced(manifest)
        complete = len(receipts) == size and all(receipt.rank == rank for rank, receipt in enumerate(receipts))
        _require(complete, "it does not name one receipt per rank")
        _require(all(shard.rank < size for shard in content.shards), "a shard's rank is outside the world")
        _require_different([shard.name for shard in content.shards], "two shards of one name")
        known = set(content.entries.name)
        for alias, name in content.aliases.items():
            _require(alias not in known, f"alias {alias[:80]!r} is not allowed")
            _require(name in known, f"alias {alias[:80]!r} names no entry")


def check_content(attempt: str, content: Content, key: str) -> None:
    """Raises CorruptObject unless the content of some ranks of an attempt is valid: columns match in length, and all
    names and indices refer to something."""
    with _checking(key):
        _require_different([shard.name for shard in content.shards], "two shards of one name")
        tables = [table for shard in content.shards for table in (shard, *shard.below)]
        _check_chunks(tables)
        _check_entries(content.entries)
        _check_rows(content)
        _check_slices(content)
        _require(all(len(alias) <= _MAX_NAME for alias in content.aliases), "an alias is too long")
        _check_references(attempt, tables)
        for shard in content.shards:
            _check_bases(shard)


def _trailer(body: bytes) -> bytes:
    return b'\n{"xxh3_128":"' + digest(body).encode() + b'"}\n'


def _decode(body: bytes, kind: type[_S], key: str) -> _S:
    try:
        try:
            document: Any = decode_json(body, kind, decode_hook)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, InvalidRequest):
            _check_head(decode_json(body, _Head), key)  # a newer version is not corrupt, whatever its fields are
            raise
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptObject(f"{key} is not a valid {kind.__name__.lower()}: {error}") from error
    except InvalidRequest as error:  # a policy checks itself when it is decoded
        raise CorruptObject(f"{key}: {error.message}") from error
    _check_head(document, key)
    return cast(_S, document)


def _check_head(head: _Head, key: str) -> None:
    if head.format < 1:
        raise CorruptObject(f"{key} has format version {head.format}")
    if head.format > FORMAT:
        raise UnsupportedFormat(
            f"{key} has format version {head.format}, this program reads up to {FORMAT}", "Upgrade ckptd"
        )
    unknown = sorted(name for name in head.extensions.keys() - _KNOWN if name.startswith(_CRITICAL))
    if unknown:
        raise UnsupportedFormat(f"{key} needs {', '.join(unknown[:8])}, which this program lacks", "Upgrade ckptd")


def _check_names(document: Document, key: str) -> None:
    if not hasattr(document, "attempt"):
        return
    with _checking(key):
        attempt = names.Attempt.parse(document.attempt)
        if isinstance(document, Receipt | Manifest | Outcome):
            names.check_run(document.run)
            _require(document.step == attempt.step, f"step {document.step} is not that of attempt {attempt}")


class _Invalid(Exception):
    """A document breaks a rule, which the message states."""


@contextmanager
def _checking(key: str) -> Iterator[None]:
    """Raises CorruptObject about `key` for a broken rule or name."""
    try:
        yield
    except (_Invalid, BadInput) as error:
        raise CorruptObject(f"{key}: {error}") from error


def _require(condition: Any, message: str) -> None:
    if not condition:
        raise _Invalid(message)


def _require_different(values: Sequence[object], message: str) -> None:
    _require(len(set(values)) == len(values), message)


def _same_length(what: str, *columns: Sized) -> None:
    _require(len({len(column) for column in columns}) == 1, f"columns of {what} differ in length")


def _check_rank(receipt: Receipt) -> None:
    _require(receipt.rank < receipt.world_size, f"rank {receipt.rank} is outside the world")
    _check_announced(receipt)
    owners = {shard.rank for shard in receipt.content.shards}
    _require(owners <= {receipt.rank}, "a receipt names the shard of another rank")


def _check_announced(document: Receipt | Manifest) -> None:
    """Readers that do not know what it has refuse the document as newer, not as damaged."""
    shards = document.content.shards
    divided = any(names.is_optimizer_shard(shard.name) for shard in shards)
    for name, present in ((BASES, any(shard.bases for shard in shards)), (OPTIMIZER, divided)):
        _require(name in document.extensions or not present, f"it lacks the extension {name}")


def _check_generation(generation: Generation) -> None:
    """Its parent is of an earlier generation."""
    names.check_run(generation.run)
    names.check_ulid(generation.session)
    _require(names.check_generation(generation.number) > 0, "generation 0 has no document")
    if generation.parent is not None:
        parent = names.Attempt.parse(generation.parent)
        _require(parent.generation < generation.number, "the parent is not of an earlier generation")


def _check_deleted(deleted: DeletedList) -> None:
    """It names different attempts of its generation, in order."""
    names.check_generation(deleted.generation)
    _require(all(a < b for a, b in pairwise(deleted.attempts)), "the attempts are not in order")
    known = map(names.Attempt.parse, deleted.attempts)
    _require(all(attempt.generation == deleted.generation for attempt in known), "an attempt is of another generation")


def _check_references(attempt: str, shards: Sequence[Shard]) -> None:
    """References point to other attempts, at most one per chunk."""
    for shard in shards:
        found = shard.references
        if found is None:
            continue
        _same_length("references", found.chunk, found.attempt, found.offset)
        for other in found.attempts:
            names.Attempt.parse(other)
        _require_different([*found.attempts, attempt], "a reference to itself, or twice to one")
        _require((np.diff(found.chunk) > 0).all(), "references are not in order")
        _require(found.chunk.max(initial=-1) < len(shard.chunks.raw), "a reference is to no chunk")
        used = distinct(found.attempt)
        _require(len(used) and used.tolist() == list(range(len(found.attempts))), "an attempt is not referenced")
        _require(found.offset.max(initial=0) <= MAX_BYTES, "a reference is out of bounds")


def _check_bases(shard: Shard) -> None:
    """Each delta has bases: a whole chunk, then deltas, all of its size. No other chunk has any."""
    chunks, found = shard.chunks, shard.bases
    deltas = np.flatnonzero(_deltas(chunks))
    if found is None:
        _require(not len(deltas), "a delta has no base")
        return
    _same_length("bases", found.of, found.chunks.raw, found.references.chunk)
    _require((np.diff(found.of) >= 0).all() and np.array_equal(distinct(found.of), deltas), "bases of no delta")
    _require(np.array_equal(found.chunks.raw, chunks.raw[found.of]), "a base has another size")
    _require(np.array_equal(_deltas(found.chunks), np.diff(found.of, prepend=-1) == 0), "only the first base is whole")
    _require(chunks.raw_digest is not None, "a delta has no raw digest")


def _deltas(chunks: Chunks) -> Any:
    return np.array([codec == DELTA for codec in chunks.codecs], np.bool_)[chunks.codec]


def _check_chunks(shards: Sequence[Shard]) -> None:
    for shard in shards:
        chunks = shard.chunks
        names.check_shard(shard.name)
        _same_length("chunks", chunks.raw, chunks.stored, chunks.codec)
        _require(len(chunks.digest) == DIGEST_BYTES * len(chunks.raw), "a chunk has no digest")
        known = chunks.raw_digest
        _require(known is None or len(known) == len(chunks.digest), "raw digests and chunks differ in number")
        _require_different(chunks.codecs, "codecs are named twice")
        _require({*chunks.codecs} <= {*CODECS, DELTA}, "a chunk's codec is unknown")
        _require(chunks.codec.max(initial=-1) < len(chunks.codecs), "a chunk names no codec")
    for name, what in (("raw", "raw size"), ("stored", "size")):
        sizes = concatenate(getattr(shard.chunks, name) for shard in shards)
        _require(((sizes > 0) & (sizes <= MAX_CHUNK_BYTES)).all(), f"a chunk's {what} is out of bounds")


def _check_entries(entries: Entries) -> None:
    _require_different(entries.name, "two entries of one name")
    lengths = {1, *map(len, entries.name)}
    _require(min(lengths) > 0 and max(lengths) <= _MAX_NAME, "an entry's name is empty or too long")
    _require(set(entries.dtype) <= ITEM_BYTES.keys(), "an entry's dtype is unknown")
    _require(max(map(len, entries.shape), default=0) <= MAX_DIMENSIONS, "an entry has too many dimensions")
    dimensions = set(chain.from_iterable(entries.shape))
    in_bounds = min(dimensions, default=0) >= 0 and max(dimensions, default=0) <= MAX_BYTES
    _require(in_bounds, "a dimension is out of bounds")
    sizes = map(mul, map(prod, entries.shape), map(ITEM_BYTES.__getitem__, entries.dtype))
    _require(max(sizes, default=0) <= MAX_BYTES, "an entry's size is out of bounds")


def _check_rows(content: Content) -> None:
    """Columns match in length, and indices of rows are within the content."""
    slices, entries = content.slices, content.entries
    _same_length("entries", entries.name, entries.dtype, entries.shape)
    _same_length("slices", slices.entry, slices.shard, slices.at)
    _require(slices.entry.max(initial=-1) < len(entries.name), "a slice names no entry")
    _require(slices.shard.max(initial=-1) < len(content.shards), "a slice names no shard")
    _require(slices.derived_rows.max(initial=-1) < len(slices.entry), "a derived slice is none")
    dimensions = column(map(len, entries.shape))[slices.entry]
    _require(len(slices.box) == 2 * int(dimensions.sum()), "boxes and slices differ in number")


def _check_slices(content: Content) -> None:
    slices = content.slices
    ends = np.cumsum(column(len(shard.chunks.raw) for shard in content.shards))
    streams = np.cumsum(concatenate(shard.chunks.raw for shard in content.shards))
    shard_bytes = np.diff(np.append(0, streams)[np.append(0, ends)])
    is_derived = np.zeros(len(slices.entry), np.bool_)
    if slices.derived is not None:
        _require(len(slices.derived) and (np.diff(slices.derived) > 0).all(), "derived slices are not in order")
        is_derived[slices.derived] = True
    sizes = np.zeros(len(slices.entry), np.int64)
    for group in same_dimensions(content, np.arange(len(slices.entry)), BLOCK):
        inside = (group.offsets <= group.shapes) & (group.sizes <= group.shapes - group.offsets)
        _require(inside.all(), "a box leaves its entry")
        sizes[group.rows] = group.bytes
        room = shard_bytes[slices.shard[group.rows]] - group.bytes
        fits = (slices.at[group.rows] <= room) | is_derived[group.rows]
        _require(fits.all(), "a slice leaves its shard")
    stored = np.flatnonzero(~is_derived)
    _require(_apart(slices.shard[stored], slices.at[stored], sizes[stored]), "two slices share bytes of a shard")
    _check_derived(content, sizes, stored)


def _check_derived(content: Content, sizes: Column, stored: Column) -> None:
    """Each derived slice has its own source: a stored float32 slice with the same number of elements."""
    slices, dtypes = content.slices, content.entries.dtype
    if slices.derived is None:
        return

    def place(row: int) -> tuple[int, int]:
        return int(slices.shard[row]), int(slices.at[row])

    derived = slices.derived.tolist()
    near = stored[np.isin(slices.at[stored], slices.at[derived]) & (sizes[stored] > 0)].tolist()
    sources = {place(row): row for row in near}
    _require_different([*map(place, derived)], "two slices are derived from one")
    for row in derived:
        source = sources.get(place(row))
        if source is None:
            raise _Invalid("a slice is derived from none")
        types = dtypes[slices.entry[source]], dtypes[slices.entry[row]]
        _require(types[0] == SOURCE and types[1] in CAST_TYPES, "a slice is derived from one of another type")
        _require(int(sizes[source]) == 2 * int(sizes[row]), "a slice is derived from one of another size")


def _apart(shard: Column, at: Column, sizes: Column) -> bool:
    """Whether no two slices share a byte. Otherwise a small manifest could expand into a plan of any size."""
    if not (sizes > 0).all():
        shard, at, sizes = shard[sizes > 0], at[sizes > 0], sizes[sizes > 0]
    if not bool((shard[1:] >= shard[:-1]).all() and ((at[1:] > at[:-1]) | (shard[1:] > shard[:-1])).all()):
        order = np.lexsort((at, shard))
        shard, at, sizes = shard[order], at[order], sizes[order]
    return bool(((shard[1:] != shard[:-1]) | (at[1:] >= at[:-1] + sizes[:-1])).all())
