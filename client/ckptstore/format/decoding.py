"""Thread-safe decoding of JSON to typed values. No I/O.

msgspec inspects a type when the first decoder of it is created, and crashes the process if two threads do so at once.
Decoders are therefore created here under a lock. Many threads can use the same decoder.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

import msgspec

from ckptstore.format.codecs import Buffer

_T = TypeVar("_T")
Hook = Callable[[type, Any], Any]

_making = threading.Lock()
_decoders: dict[tuple[Any, Hook | None], msgspec.json.Decoder[Any]] = {}


def decode_json(data: Buffer | str, kind: type[_T], hook: Hook | None = None) -> _T:
    """Decode `data` as `kind`. hook: converts types that msgspec does not support. Raises msgspec's errors."""
    with _making:
        decoder = _decoders.get((kind, hook))
        if decoder is None:
            decoder = _decoders[kind, hook] = msgspec.json.Decoder(kind, dec_hook=hook)
    return cast(_T, decoder.decode(data))
