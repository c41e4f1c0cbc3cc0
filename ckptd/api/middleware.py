"""Around every request: its id, its log line, its counters, its errors, and the token."""

from __future__ import annotations

import logging
import re
from hmac import compare_digest
from time import perf_counter
from urllib.parse import quote
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ckptd.api.problems import error_response, problem_response
from ckptd.logs import REQUEST_ID
from ckptd.metrics import Metrics
from ckptstore.errors import CkptError, Unavailable

_LOG = logging.getLogger(__name__)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
PROBES = frozenset({"/livez", "/readyz", "/metrics"})
"""Need no token, and are not logged."""


class Requests:
    """The outermost layer: nothing escapes it, so a client never sees a traceback."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = perf_counter()
        request_id = _request_id(Headers(scope=scope).get("x-request-id", ""))
        token = REQUEST_ID.set(request_id)
        status = 0

        async def observe(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-ID"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, observe)
        except Exception as error:
            self._log(error, scope)
            if not status:
                await _response(error)(scope, receive, observe)
            # Else the answer is cut off: the server closes the connection, the reader sees too few bytes.
        finally:
            self._finish(scope, status, perf_counter() - began)
            REQUEST_ID.reset(token)

    def _log(self, error: Exception, scope: Scope) -> None:
        if not isinstance(error, CkptError):
            _LOG.error("unexpected error", exc_info=error)
            return
        if error.http_status >= 500:
            _LOG.warning("%s: %s", error.code, error)
        if isinstance(error, Unavailable):
            self._metrics.store_errors.labels(_route(scope), error.code).inc()

    def _finish(self, scope: Scope, status: int, seconds: float) -> None:
        route = _route(scope)
        self._metrics.http_requests.labels(scope["method"], route, str(status)).inc()
        self._metrics.http_seconds.labels(route).observe(seconds)
        level = logging.DEBUG if scope["path"] in PROBES else logging.INFO
        _LOG.log(level, "%s %s %d %.0f ms", scope["method"], quote(scope["path"], safe="/@"), status, seconds * 1e3)


class Authentication:
    """Lets pass what carries the token. Without a token configured, everything."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode() if token else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http" or not self._expected or scope["path"] in PROBES or self._allows(scope):
            await self._app(scope, receive, send)
            return
        refusal = problem_response(
            401,
            "unauthorized",
            "this daemon asks for a token",
            "Send Authorization: Bearer <the daemon's CKPTD_TOKEN>",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await refusal(scope, receive, send)

    def _allows(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return compare_digest(given, self._expected)


def _request_id(given: str) -> str:
    return given if _REQUEST_ID.fullmatch(given) else uuid4().hex


def _response(error: Exception) -> ASGIApp:
    if isinstance(error, CkptError):
        return error_response(error)
    return problem_response(500, "internal", "the daemon made a mistake", "Its log says more, under this request id")


def _route(scope: Scope) -> str:
    return getattr(scope.get("route"), "path", "none")
