"""From JSON to typed values, from any thread. No I/O.

msgspec finds out about a type when it is first used, and crashes the process if two threads do so at once. So decoders
are made here, one after the other; a decoder that is made can be used by many threads.
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
    """`data` as an instance of `kind`; hook: for types that msgspec does not know. Raises what msgspec raises."""
    with _making:
        decoder = _decoders.get((kind, hook))
        if decoder is None:
            decoder = _decoders[kind, hook] = msgspec.json.Decoder(kind, dec_hook=hook)
    return cast(_T, decoder.decode(data))
