"""What a request may cost before anybody looks at it: its headers, its query, and how many its client has open."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from ckptd.api.problems import problem_response
from ckptd.api.sharing import Limits

MAX_HEADERS = 100
"""The server itself limits their bytes to 64 KiB, the request line included."""
MAX_QUERY_BYTES = 8 << 10
PER_CLIENT = 4096
TOTAL = 16384


class Bounds:
    """Refuses what is too large or too much."""

    def __init__(self, app: ASGIApp, limits: Limits | None = None) -> None:
        self._app = app
        self._limits = limits or Limits("requests", PER_CLIENT, TOTAL)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises TooManyRequests."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        for found, limit, status, what in (
            (len(scope["headers"]), MAX_HEADERS, 431, "headers"),
            (len(scope["query_string"]), MAX_QUERY_BYTES, 414, "bytes of query"),
        ):
            if found > limit:
                text = f"the request has {found} {what}, {limit} are allowed"
                await problem_response(status, "invalid_request", text, "Send less")(scope, receive, send)
                return
        with self._limits.one(scope["client"][0] if scope["client"] else "-"):
            await self._app(scope, receive, send)
