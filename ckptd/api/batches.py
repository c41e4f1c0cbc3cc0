"""Many ranges of the shards of one checkpoint in one answer.

For each range, in the order of the request: its number of bytes as eight bytes, little-endian, then the bytes. Whoever
asks knows the lengths; that they are repeated shows where an answer was cut or mixed up.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from ckptapi import bodies
from ckptd.api.checkpoints import Id
from ckptd.http.bodies import read_body
from ckptd.http.context import Context, Given
from ckptd.http.openapi import documented
from ckptd.http.streaming import ByteRange, Reader, unsatisfiable
from ckptd.services.objects import StoredObject
from ckptstore.errors import InvalidRequest
from ckptstore.names import Reference

router = APIRouter()

_MAX_BODY_BYTES = 1 << 20
_HEADER = struct.Struct("<Q")


@router.post(
    bodies.CHECKPOINTS + "/{id}/read", **documented(None, 404, 416, body=bodies.ReadRequest, media=bodies.RANGES_MEDIA)
)
async def read(request: Request, given: Given, id: Id) -> Response:
    """Many ranges of shards in one answer: each as its length in eight bytes, little-endian, and its bytes."""
    body = await read_body(request, bodies.ReadRequest, _MAX_BODY_BYTES)
    if not 0 < len(body.ranges) <= bodies.MAX_RANGES:
        raise InvalidRequest(f"{len(body.ranges)} ranges are asked for", f"Ask for 1 to {bodies.MAX_RANGES}")
    shards = await _shards(given, Reference.parse(id), sorted({part.shard for part in body.ranges}))
    for part in body.ranges:
        size = shards[part.shard].bytes
        if part.offset + part.count > size:
            return unsatisfiable(
                size, f"bytes {part.offset} to {part.offset + part.count} of {part.shard} were asked for"
            )
    total = sum(_HEADER.size + part.count for part in body.ranges)
    reads = [(shards[part.shard], ByteRange(part.offset, part.count)) for part in body.ranges]
    reader = Reader.of(request, given)
    first = await reader.read(*reads[0])
    headers = {"Content-Length": str(total), "Cache-Control": "no-store"}
    return StreamingResponse(_framed(reader, reads, first), 200, headers, media_type=bodies.RANGES_MEDIA)


async def _shards(given: Context, reference: Reference, names: Sequence[str]) -> dict[str, StoredObject]:
    def find() -> dict[str, StoredObject]:
        return {name: given.services.objects.shard(reference, name) for name in names}

    return await given.threads.store(find)


async def _framed(
    reader: Reader, reads: Sequence[tuple[StoredObject, ByteRange]], first: memoryview
) -> AsyncIterator[bytes | memoryview]:
    for number, (stored, wanted) in enumerate(reads):
        yield _HEADER.pack(wanted.count)
        begin = await reader.read(stored, wanted) if number else first
        async for piece in reader.pieces(stored, wanted, begin):
            yield piece
