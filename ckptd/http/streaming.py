"""Stored objects as streamed responses: whole or a range, never all of it in memory."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ckptd.http.context import Context
from ckptd.http.problems import problem_response
from ckptd.services.contents import StoredObject
from ckptstore.reading.weights import VirtualFile
from ckptstore.values import Value

_SENT_BYTES = 512 << 10
"""Per write, so that data copied on its way to the socket stays in the CPU cache."""
MEDIA_TYPE = "application/octet-stream"

ReadPiece = Callable[[int, int], memoryview]
"""Blocks and returns bytes, given an offset and a count: one at least, and at most the count."""


class Reader(Value):
    """Reads for one request: shares the read slots fairly."""

    context: Context
    client: str
    blocking: ReadPiece

    async def read(self, wanted: range) -> memoryview:
        """The first bytes of a range: as many as one read returns."""
        async with self.context.read_slots.slot(self.client):
            return await self.context.with_store(self.blocking, wanted.start, len(wanted))

    async def pieces(self, wanted: range, first: memoryview) -> AsyncIterator[memoryview]:
        """The pieces of a range; `first` was read already. Each is read while the one before is sent."""
        piece, following = first, None
        try:
            while True:
                wanted = wanted[len(piece) :]
                following = asyncio.ensure_future(self.read(wanted)) if wanted else None
                for at in range(0, len(piece), _SENT_BYTES):
                    yield piece[at : at + _SENT_BYTES]
                self.context.metrics.read_bytes.inc(len(piece))
                if following is None:
                    return
                piece = await following
        finally:
            if following is not None and not following.cancel() and not following.cancelled():
                following.exception()  # the client is gone: the error is not raised


def client_of(request: Request) -> str:
    """The client for fairness and limits: its address."""
    return request.client.host if request.client else "-"


async def object_response(
    request: Request, context: Context, find: Callable[..., StoredObject], *of: object
) -> Response:
    """The response to GET or HEAD of the object that `find(*of)` returns, which waits for the store.

    A request that asks for it bypasses the cache.
    """
    stored = await context.with_store(find, *of)
    fresh = "no-cache" in request.headers.get("cache-control", "").lower()
    read = partial(context.objects.read, stored, fresh=fresh)
    caching = {"Cache-Control": "private, max-age=31536000, immutable"}
    return await streamed(request, context, stored, read, caching)


async def streamed(
    request: Request, context: Context, file: StoredObject | VirtualFile, read: ReadPiece, headers: Mapping[str, str]
) -> Response:
    """The response to GET or HEAD of bytes that do not change, per RFC 9110."""
    etag = f'"{file.version}"'
    headers = {**headers, "ETag": etag, "Accept-Ranges": "bytes"}
    if matches(request.headers.get("if-none-match"), etag):
        return Response(status_code=304, headers=headers)
    if request.method == "HEAD":
        return Response(headers={**headers, "Content-Length": str(file.bytes)}, media_type=MEDIA_TYPE)
    may_be_partial = request.headers.get("if-range", etag) == etag
    try:
        requested = parse_range(request.headers.get("range"), file.bytes) if may_be_partial else None
    except Unsatisfiable:
        return unsatisfiable(file.bytes, f"Range was {request.headers['range'][:80]!r}")
    wanted = requested or range(file.bytes)
    headers["Content-Length"] = str(len(wanted))
    if requested:
        headers["Content-Range"] = f"bytes {requested[0]}-{requested[-1]}/{file.bytes}"
    reader = Reader(context, client_of(request), read)
    # The first piece is read before the status is sent, so that a missing object is still a 404.
    pieces = reader.pieces(wanted, await reader.read(wanted))
    return StreamingResponse(pieces, 206 if requested else 200, headers, media_type=MEDIA_TYPE)


def unsatisfiable(size: int, requested: str) -> Response:
    """The response to a range outside the object."""
    return problem_response(
        416,
        "range_not_satisfiable",
        f"the object has {size} bytes, {requested}",
        "Ask for one range of bytes inside the object",
        headers={"Content-Range": f"bytes */{size}"},
    )


def matches(header: str | None, etag: str) -> bool:
    """Whether If-None-Match contains this ETag."""
    if header is None:
        return False
    given = {part.strip().removeprefix("W/") for part in header.split(",")}
    return "*" in given or etag in given


_RANGE = re.compile(r"\s*bytes\s*=\s*([0-9]{0,19})\s*-\s*([0-9]{0,19})\s*", re.IGNORECASE)


class Unsatisfiable(Exception):
    """The range is outside the object, or is not a single byte range."""


def parse_range(header: str | None, size: int) -> range | None:
    """The bytes of an object of `size` bytes that a header requests, one at least; None for the whole object.

    Units other than bytes are ignored, per RFC 9110. It permits rejecting malformed headers and multiple ranges;
    answering those with the whole shard could send many gigabytes. Raises Unsatisfiable.
    """
    if header is None or not header.strip().lower().startswith("bytes"):
        return None
    match = _RANGE.fullmatch(header)
    if match is None or not (match[1] or match[2]):
        raise Unsatisfiable
    if not match[1]:
        found = range(max(0, size - int(match[2])), size)
    else:
        found = range(int(match[1]), min(int(match[2]) + 1, size) if match[2] else size)
    if not found:
        raise Unsatisfiable
    return found
