"""Encoding and strict, bounded parsing of documents. No I/O.

A small document is sealed: a line of JSON, then a line with its checksum. A manifest is zstd-compressed JSON whose
checksum is in the outcome. Documents are untrusted input: `parse_*` checks every field before it returns one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any, TypeVar, cast

import msgspec
import zstandard

from ckptstore import names
from ckptstore.errors import BadInput, CorruptObject, InvalidRequest, UnsupportedFormat
from ckptstore.format import checks
from ckptstore.format.columns import decode_hook, encode_hook
from ckptstore.format.decoding import decode_json
from ckptstore.format.documents import (
    FORMAT,
    JSON,
    Content,
    Document,
    Generation,
    LocalState,
    Manifest,
    Outcome,
    Receipt,
    Shard,
    digest,
)
from ckptstore.format.records import DeadList

MAX_SEALED_BYTES = 256 << 20
MAX_MANIFEST_BYTES = 4 << 30
# More is a decompression bomb. Equal slices on a thousand ranks compressed 120-fold.
_BOMB_FLOOR = 256 << 20
_BOMB_RATIO = 1000

_D = TypeVar("_D", bound=Document)
_S = TypeVar("_S", bound=msgspec.Struct)


class _Head(msgspec.Struct):
    """What decides whether this program understands a document, whatever its other fields are."""

    format: int
    extensions: dict[str, JSON] = {}


_CRITICAL = "critical."
"""Begins the names of extensions that a reader must know. This program knows none."""


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
    end = data.find(b"\n")
    body = data[:end] if end >= 0 else data
    return data == body + _trailer(body)


def parse_sealed(data: bytes, kind: type[_D], key: str) -> _D:
    """Parse the document in `data`, read from `key`; verifies its checksum and all fields.

    Raises CorruptObject or UnsupportedFormat.
    """
    document = _open_sealed(data, kind, key)
    if isinstance(document, Receipt):
        check_receipt(document, key)
    if isinstance(document, Outcome) and document.committed is not None:
        _checked(key, checks.check_committed, document.committed)
    if isinstance(document, Generation):
        _checked(key, checks.check_generation, document)
    if isinstance(document, DeadList):
        _checked(key, checks.check_dead, document)
    return document


def parse_part(data: bytes, key: str) -> Receipt:
    """Parse the receipt in `data`, read from `key`, for a merge, which checks the contents of many together.

    Raises CorruptObject or UnsupportedFormat.
    """
    receipt = _open_sealed(data, Receipt, key)
    _checked(key, checks.check_part, receipt)
    return receipt


def check_receipt(receipt: Receipt, key: str) -> None:
    """Raises CorruptObject unless every field of the receipt is valid."""
    _checked(key, checks.check_receipt, receipt)


def _open_sealed(data: bytes, kind: type[_D], key: str) -> _D:
    if len(data) > MAX_SEALED_BYTES:
        raise CorruptObject(f"{key} is larger than {MAX_SEALED_BYTES} bytes")
    if not is_sealed(data):
        raise CorruptObject(f"{key} does not match its checksum")
    end = data.find(b"\n")
    document = _decode(data[:end] if end >= 0 else data, kind, key)
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
    _checked(key, checks.check_receipts, manifest)
    _checked(key, checks.check_shard_names, manifest.content)
    _checked(key, checks.check_aliases, manifest.content)


def check_content(attempt: str, content: Content, key: str) -> None:
    """Raises CorruptObject unless the content of some ranks of an attempt is valid."""
    _checked(key, checks.check_content, content)
    _checked(key, checks.check_references, attempt, content)


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
    unknown = sorted(name for name in head.extensions if name.startswith(_CRITICAL))
    if unknown:
        raise UnsupportedFormat(f"{key} needs {', '.join(unknown[:8])}, which this program lacks", "Upgrade ckptd")


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
    except (checks.Invalid, BadInput) as error:
        raise CorruptObject(f"{key}: {error}") from error
