"""JSON bodies, in and out, as ckptapi.bodies defines them."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ckptd.http.access import check_body
from ckptstore.errors import InvalidRequest
from ckptstore.format.decoding import decode_json

MAX_BODY_BYTES = 64 << 10
_B = TypeVar("_B")


async def read_body(request: Request, kind: type[_B], max_bytes: int = MAX_BODY_BYTES) -> _B:
    """The body of a request, an instance of `kind`. Raises InvalidRequest or Forbidden."""
    # Browsers send other types across sites without a preflight, and a web page must not be able to prune.
    if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
        raise InvalidRequest(
            "the Content-Type of the body is not application/json", "Send Content-Type: application/json"
        )
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > max_bytes:
            raise InvalidRequest(f"the body is larger than {max_bytes} bytes", "Send a smaller request")
    try:
        body = decode_json(data, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        name = getattr(kind, "__name__", "request")
        raise InvalidRequest(f"the body is not a {name}: {error}", "See docs/how-to/http-api.md") from error
    check_body(request, body)
    return body


def json_response(body: msgspec.Struct, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON response. Equal bodies give equal bytes."""
    return Response(msgspec.json.encode(body), status, headers, "application/json")
