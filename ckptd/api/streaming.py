"""Stored objects as answers: whole or a range, piece by piece, never all of it in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ckptd.api.context import Context
from ckptd.api.problems import problem_response
from ckptd.api.ranges import ByteRange, Unsatisfiable, parse_range
from ckptd.metrics import Metrics
from ckptd.services.objects import StoredObject

_MEDIA_TYPE = "application/octet-stream"


async def object_response(request: Request, context: Context, stored: StoredObject) -> Response:
    """The answer to GET or HEAD of an object, as RFC 9110 wants it."""
    etag = f'"{stored.version}"'
    headers = {"ETag": etag, "Accept-Ranges": "bytes", "Cache-Control": "private, max-age=31536000, immutable"}
    if matches(request.headers.get("if-none-match"), etag):
        return Response(status_code=304, headers=headers)
    if request.method == "HEAD":
        return Response(headers={**headers, "Content-Length": str(stored.bytes)}, media_type=_MEDIA_TYPE)
    try:
        asked = parse_range(request.headers.get("range"), stored.bytes) if _may_be_partial(request, etag) else None
    except Unsatisfiable:
        return problem_response(
            416,
            "range_not_satisfiable",
            f"the object has {stored.bytes} bytes, Range was {request.headers['range'][:80]!r}",
            "Ask for one range of bytes inside the object",
            headers={"Content-Range": f"bytes */{stored.bytes}"},
        )
    wanted = asked or ByteRange(0, stored.bytes)
    headers["Content-Length"] = str(wanted.count)
    if asked:
        headers["Content-Range"] = f"bytes {asked.offset}-{asked.offset + asked.count - 1}/{stored.bytes}"
    fresh = "no-cache" in request.headers.get("cache-control", "").lower()

    async def read(wanted: ByteRange) -> memoryview:
        return await context.threads.store(
            context.services.objects.read, stored, wanted.offset, wanted.count, fresh=fresh
        )

    # The first piece is read before the status is sent, so that a missing object is still a 404.
    pieces = _pieces(read, context.metrics, wanted, await read(wanted))
    return StreamingResponse(pieces, 206 if asked else 200, headers, media_type=_MEDIA_TYPE)


def matches(header: str | None, etag: str) -> bool:
    """Whether If-None-Match names this version."""
    if header is None:
        return False
    given = {part.strip().removeprefix("W/") for part in header.split(",")}
    return "*" in given or etag in given


def _may_be_partial(request: Request, etag: str) -> bool:
    return request.headers.get("if-range", etag) == etag


async def _pieces(
    read: Callable[[ByteRange], Awaitable[memoryview]], metrics: Metrics, wanted: ByteRange, first: memoryview
) -> AsyncIterator[memoryview]:
    piece = first
    while True:
        yield piece
        metrics.read_bytes.inc(len(piece))
        wanted = replace(wanted, offset=wanted.offset + len(piece), count=wanted.count - len(piece))
        if not wanted.count:
            return
        piece = await read(wanted)
