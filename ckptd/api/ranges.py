"""The Range header: one range of bytes per request. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

_RANGE = re.compile(r"\s*bytes\s*=\s*([0-9]{0,19})\s*-\s*([0-9]{0,19})\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ByteRange:
    """`count` bytes from `offset`; count is at least 1."""

    offset: int
    count: int


class Unsatisfiable(Exception):
    """The range asks for nothing that is there, or is not one range of bytes."""


def parse_range(header: str | None, size: int) -> ByteRange | None:
    """The range of an object of `size` bytes that a header asks for; None: the whole object.

    Units other than bytes are ignored, as RFC 9110 says. It allows to refuse what is malformed or names
    several ranges; answering those with a whole shard would be a surprise of many gigabytes.
    """
    if header is None or not header.strip().lower().startswith("bytes"):
        return None
    match = _RANGE.fullmatch(header)
    if match is None or not (match[1] or match[2]):
        raise Unsatisfiable
    if not match[1]:
        count = min(int(match[2]), size)
        offset = size - count
    else:
        offset = int(match[1])
        last = min(int(match[2]), size - 1) if match[2] else size - 1
        count = last - offset + 1
    if count <= 0:
        raise Unsatisfiable
    return ByteRange(offset, count)
