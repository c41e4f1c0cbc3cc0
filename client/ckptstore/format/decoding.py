"""Thread-safe decoding and conversion of documents to typed values. No I/O.

msgspec inspects a type when it first meets it, and crashes the process if two threads do so at once. Types are
therefore inspected here under a lock. Many threads can use the same type, or decoder, after that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

import msgspec

from ckptstore.codecs.chunk_codecs import Buffer

_T = TypeVar("_T")
Hook = Callable[[type, Any], Any]

_making = threading.Lock()


def decode_json(data: Buffer | str, kind: type[_T], hook: Hook | None = None) -> _T:
    """Decode `data` as `kind`. hook: converts types that msgspec does not support. Raises msgspec's errors."""
    return cast(_T, _decoder(kind, hook).decode(data))


def decode_msgpack(data: Buffer, kind: type[_T]) -> _T:
    """Decode `data` as `kind`. Raises msgspec's errors."""
    _decoder(kind)
    return msgspec.msgpack.decode(data, type=kind)


def convert(value: object, kind: type[_T], *, from_attributes: bool = False, strict: bool = True) -> _T:
    """Convert decoded JSON to `kind`. from_attributes: objects as well. strict: no numbers in strings.

    Raises msgspec's errors.
    """
    _decoder(kind)
    return msgspec.convert(value, kind, from_attributes=from_attributes, strict=strict)


def _decoder(kind: Any, hook: Hook | None = None) -> msgspec.json.Decoder[Any]:
    """The decoder of a type, which has been inspected on return."""
    with _making:
        return _made(kind, hook)


@cache
def _made(kind: Any, hook: Hook | None) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind, dec_hook=hook)
