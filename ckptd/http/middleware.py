"""Middleware: request ids, access log, metrics, errors, headers, authentication and size limits."""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic, perf_counter
from typing import TypeVar
from urllib.parse import quote, urlsplit
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ckptd.http.access import CALLER, STILL_VALID
from ckptd.http.concurrency import ConcurrencyLimit
from ckptd.http.problems import error_response, problem_response
from ckptd.logs import FIELDS, REQUEST_ID
from ckptd.metrics import Metrics, method_label, route_of
from ckptd.redaction import mask_passwords
from ckptd.services.tokens import ANONYMOUS, Caller, Tokens
from ckptd.settings import is_loopback
from ckptstore.errors import CkptError, Denied, Forbidden, TooManyFailures, Unauthorized

_LOG = logging.getLogger(__name__)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
PROBES = frozenset({"/healthz", "/livez", "/readyz"})
"""Paths that need no token."""
_FREQUENT = PROBES | {"/metrics"}
_METHOD_CHARS = 16
_PATH_CHARS = 1024
"""Longer methods and paths are cut in the access log."""
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_BEARER = "Bearer "
MAX_FAILURES = 10
WINDOW_S = 60.0
"""An address with this many failed authentications is blocked for this time."""
_INVALID = {"X-Error-Message": "Invalid credentials in Authorization header"}  # the words that clients of the Hub know
_HEADERS = {
    Unauthorized: {"WWW-Authenticate": "Bearer", **_INVALID},
    TooManyFailures: {"Retry-After": str(round(WINDOW_S))},
}
_HOW = "Set CKPT_TOKEN, or send Authorization: Bearer <token>; ckptd token create makes one"


@dataclass
class RequestLog:
    """The outermost layer: request id, log line, metrics, headers. Turns every exception into an error response."""

    app: ASGIApp
    metrics: Metrics
    on_start: Callable[[Scope], None] = lambda _: None
    """Called when a response begins; the route of its request is known then."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = perf_counter()
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid4().hex
        token = REQUEST_ID.set(request_id)
        status = 0

        async def observe(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-ID"] = request_id
                secure(headers, scope["scheme"] == "https")
                self.on_start(scope)
            await send(message)

        try:
            await self.app(scope, receive, observe)
        except Exception as error:
            self._log(error, scope)
            if not status:
                await _response(error)(scope, receive, observe)
            # Otherwise the response is truncated: the server closes the connection, and the client gets too few bytes.
        finally:
            self._finish(scope, status, perf_counter() - began)
            REQUEST_ID.reset(token)

    def _log(self, error: Exception, scope: Scope) -> None:
        if not isinstance(error, CkptError):
            _LOG.error("unexpected error", exc_info=error)
            return
        if error.http_status >= 500:
            _LOG.warning("%s: %s", error.code, error)
        self.metrics.count_store_error(route_of(scope), error)

    def _finish(self, scope: Scope, status: int, seconds: float) -> None:
        route = route_of(scope)
        self.metrics.http_requests.labels(method_label(scope["method"]), route, str(status)).inc()
        self.metrics.http_seconds.labels(route).observe(seconds)
        level = logging.DEBUG if scope["path"] in _FREQUENT else logging.INFO
        method, path = scope["method"][:_METHOD_CHARS], quote(scope["path"][:_PATH_CHARS], safe="/@")
        caller = scope[CALLER].name if CALLER in scope else ""
        fields = {"method": method, "path": path, "status": status, "seconds": round(seconds, 6), "caller": caller}
        _LOG.log(level, "%s %s %d %.0f ms", method, path, status, seconds * 1e3, extra={FIELDS: fields})


class Authentication:
    """Authenticates the caller. Without tokens, any process on this machine is allowed."""

    def __init__(self, app: ASGIApp, tokens: Tokens | None, metrics: Metrics) -> None:
        """tokens: None if authentication is off."""
        self._app = app
        self._gate = TokenGate(tokens, metrics) if tokens is not None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "http" and scope["path"] not in PROBES:
            scope[STILL_VALID] = lambda: True
            scope[CALLER] = _recognized(scope, self._gate) if self._gate is not None else _local(scope)
        await self._app(scope, receive, send)


class TokenGate:
    """Recognizes callers by their tokens, and blocks addresses that send too many wrong ones."""

    def __init__(self, tokens: Tokens, metrics: Metrics) -> None:
        self.tokens = tokens
        self._failures = metrics.auth_failures
        self._throttle = Throttle()

    def enter(self, address: str, secret: str) -> Caller:
        """The caller with this secret. Raises Unauthorized or TooManyFailures."""
        try:
            self._throttle.check(address, secret)
        except TooManyFailures:
            self._failures.labels("throttled").inc()
            raise
        caller = self.tokens.recognize(secret)
        if caller is None:
            self._throttle.failed(address)
            self._failures.labels("wrong_token").inc()
            raise Unauthorized("this token is unknown, revoked or expired", _HOW)
        self._throttle.succeeded(address, secret)
        return caller


def _recognized(scope: Scope, gate: TokenGate) -> Caller:
    given = Headers(scope=scope).get("authorization")
    if given is None:
        raise Unauthorized("this daemon requires a token", _HOW)
    secret = given.removeprefix(_BEARER) if given.startswith(_BEARER) else ""
    caller = gate.enter(scope["client"][0] if scope["client"] else "?", secret)
    scope[STILL_VALID] = lambda: gate.tokens.recognize(secret) is not None
    return caller


def _local(scope: Scope) -> Caller:
    """Reject foreign host names: a page of another site can resolve its own name to this address (DNS rebinding)."""
    host = urlsplit(f"//{Headers(scope=scope).get('host', '')}").hostname
    if not is_loopback(host or ""):
        raise Forbidden(
            f"without tokens this daemon answers only on loopback addresses, not on {(host or '')[:80]!r}",
            "Use http://127.0.0.1, or run the daemon with tokens",
        )
    if scope["method"] not in _SAFE and _is_cross_site(Headers(scope=scope)):
        raise Forbidden(
            "a page of another site may not change anything here", "Open the pages of this daemon, or use ckptctl"
        )
    return ANONYMOUS


def _is_cross_site(headers: Headers) -> bool:
    """Whether a browser says that a page of another origin sent the request. Other programs send neither header."""
    if (site := headers.get("sec-fetch-site")) is not None:
        return site not in ("same-origin", "none")
    origin = headers.get("origin")
    return origin is not None and urlsplit(origin).netloc != headers.get("host")


def _response(error: Exception) -> ASGIApp:
    if isinstance(error, Denied):
        headers = _HEADERS.get(type(error))
        return problem_response(error.http_status, error.code, error.message, error.hint, headers=headers)
    if isinstance(error, CkptError):
        return error_response(type(error)(mask_passwords(error.message), mask_passwords(error.hint)))
    return problem_response(
        500, "internal", "internal error of the daemon", "Its log has the details under this request id"
    )


_NOTHING = "default-src 'none'; frame-ancestors 'none'"
_PAGE = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)


def secure(headers: MutableHeaders, https: bool) -> None:
    """Add security headers to a response. CORS headers are left out: other origins may not read any response."""
    page = headers.get("content-type", "").startswith("text/html")
    headers["Content-Security-Policy"] = _PAGE if page else _NOTHING
    headers["X-Content-Type-Options"] = "nosniff"
    headers["Referrer-Policy"] = "no-referrer"
    headers["Cross-Origin-Resource-Policy"] = "same-origin"
    if https:
        headers["Strict-Transport-Security"] = "max-age=31536000"


MAX_HEADERS = 100
"""The server itself limits headers and request line to 64 KiB."""
MAX_QUERY_BYTES = 8 << 10
PER_CLIENT = 4096
TOTAL = 16384


@dataclass
class Bounds:
    """Rejects requests with too many headers or a long query, and too many concurrent requests."""

    _app: ASGIApp
    _limit: ConcurrencyLimit = field(default_factory=lambda: ConcurrencyLimit("requests", PER_CLIENT, TOTAL))

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
                text = f"the request has {found} {what}; the limit is {limit}"
                await problem_response(status, "invalid_request", text, "Send a smaller request")(scope, receive, send)
                return
        with self._limit.use(scope["client"][0] if scope["client"] else "-"):
            await self._app(scope, receive, send)


_MAX_ADDRESSES = 10_000
_MAX_TRUSTED = 10_000
_K = TypeVar("_K")
_V = TypeVar("_V")


class Throttle:
    """Counts failures per address. For one event loop.

    A token that an address has used successfully is never blocked: one job with a wrong token must not lock out the
    others on its host, or behind the same proxy.
    """

    def __init__(self, now: Callable[[], float] = monotonic) -> None:
        self._now = now
        self._failures: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self._trusted: OrderedDict[tuple[str, int], None] = OrderedDict()

    def check(self, address: str, secret: str) -> None:
        """Raises TooManyFailures if the address is blocked for this token."""
        began, count = self._failures.get(address, (0.0, 0))
        if count < MAX_FAILURES or self._now() - began >= WINDOW_S or (address, hash(secret)) in self._trusted:
            return
        raise TooManyFailures(
            f"{count} requests from {address} had a wrong token within {WINDOW_S:.0f} seconds",
            "Correct the token, and wait a minute",
        )

    def succeeded(self, address: str, secret: str) -> None:
        """Trust this token from this address from now on."""
        remember(self._trusted, (address, hash(secret)), None, _MAX_TRUSTED)

    def failed(self, address: str) -> None:
        """Count a failure."""
        now = self._now()
        began, count = self._failures.get(address, (now, 0))
        fresh = now - began >= WINDOW_S
        remember(self._failures, address, (now, 1) if fresh else (began, count + 1), _MAX_ADDRESSES)


def remember(table: OrderedDict[_K, _V], key: _K, value: _V, limit: int) -> None:
    """Put a value into a table; of more than `limit` entries, the oldest ones are removed."""
    table[key] = value
    table.move_to_end(key)
    while len(table) > limit:
        table.popitem(last=False)
