"""Middleware of the pages: logins, forms, static files, and error pages.

Session cookies are valid on pages only. There the session's token is put into the request, so that access rules and run
globs apply as for any other client. The API ignores cookies.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections import OrderedDict
from hmac import compare_digest
from http import HTTPStatus
from importlib.resources import files
from typing import NamedTuple
from urllib.parse import parse_qs, quote

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ckptd.http.middleware import TokenGate, remember
from ckptd.logs import REQUEST_ID
from ckptd.metrics import Metrics
from ckptd.pages.rendering import page
from ckptd.services.tokens import Tokens
from ckptstore.clock import Clock
from ckptstore.errors import CkptError, Forbidden, InvalidRequest, TooManyFailures, Unauthorized
from ckptstore.format.documents import digest

SESSION = "ckptd_session"
_FORM = "ckptd_form"
_LOGIN, _LOGOUT = "/login", "/logout"
_PAGE = re.compile(
    r"/|/(attempts|jobs|restores|store)|/(jobs|restores)/[^/]+|/(runs|goodput)/.+|/checkpoints/[^@]+@[^/]+"
)
_FORM_SECRET = re.compile(r"[A-Za-z0-9_-]{43}")
_MAX_NEXT = 400
_LOG = logging.getLogger(__name__)


class PageSessions:
    """Runs before the authentication middleware."""

    def __init__(self, app: ASGIApp, tokens: Tokens | None, metrics: Metrics, clock: Clock) -> None:
        """tokens: None if authentication is off."""
        self._app = app
        self._gate = TokenGate(tokens, metrics) if tokens is not None else None
        self._sessions = Sessions(clock)
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http" or not _ours(scope["path"]):
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        if scope["path"].startswith(PREFIX):
            await static_response(request)(scope, receive, send)
            return
        token = self._sessions.secret_of(request.cookies.get(SESSION, ""))
        secret = _form_secret(request)
        scope[VISIT] = Visit(secret, token is not None, self._clock())
        send = _with_form_cookie(request, secret, send)
        try:
            if scope["path"] in (_LOGIN, _LOGOUT):
                await (await self._answer(request))(scope, receive, send)
            else:
                if token is not None:
                    _present(token, scope)
                await self._app(scope, receive, send)
        except Unauthorized:
            await RedirectResponse(f"{_LOGIN}?next={quote(_here(request))}", 303)(scope, receive, send)
        except CkptError as error:
            await _problem(error)(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        if self._gate is None:
            return RedirectResponse("/", 303)
        if request.method == "POST":
            form = await read_form(request)
            if request.url.path == _LOGOUT:
                return self._log_out(request)
            return self._log_in(request, self._gate, form)
        return _login_page(request, _local_path(request.query_params.get("next", "/")))

    def _log_in(self, request: Request, gate: TokenGate, form: dict[str, str]) -> Response:
        secret, following = form.get("token", "").strip(), _local_path(form.get("next", "/"))
        try:
            gate.enter(request.client.host if request.client else "?", secret)
        except (TooManyFailures, Unauthorized) as error:
            return _login_page(request, following, error.message, error.http_status)
        answer = RedirectResponse(following, 303)
        id = self._sessions.begin(secret)
        answer.raw_headers.append(cookie(request, SESSION, id, LIFETIME_S))
        return answer

    def _log_out(self, request: Request) -> Response:
        self._sessions.end(request.cookies.get(SESSION, ""))
        answer = RedirectResponse(_LOGIN, 303)
        answer.raw_headers.append(cookie(request, SESSION, "", 0))
        return answer


def _ours(path: str) -> bool:
    return path.startswith(PREFIX) or path in (_LOGIN, _LOGOUT) or _PAGE.fullmatch(path) is not None


def _present(token: str, scope: Scope) -> None:
    """Replace the Authorization header by the session's token."""
    others = [(name, value) for name, value in scope["headers"] if name != b"authorization"]
    scope["headers"] = [*others, (b"authorization", f"Bearer {token}".encode("latin-1", "replace"))]


def _form_secret(request: Request) -> str:
    known = request.cookies.get(_FORM, "")
    return known if _FORM_SECRET.fullmatch(known) else secrets.token_urlsafe(32)


def _with_form_cookie(request: Request, secret: str, send: Send) -> Send:
    """Set the CSRF cookie if the browser does not have it."""
    if request.cookies.get(_FORM) == secret:
        return send

    async def send_cookie(message: Message) -> None:
        if message["type"] == "http.response.start":
            header = cookie(request, _FORM, secret, LIFETIME_S)
            message = {**message, "headers": [*message["headers"], header]}
        await send(message)

    return send_cookie


def _here(request: Request) -> str:
    """The page to show after the login: the requested one, if it can be requested again."""
    if request.method != "GET":
        return "/"
    query = f"?{request.url.query}" if request.url.query else ""
    return _local_path(quote(request.url.path, safe="/@") + query)


def _local_path(wanted: str) -> str:
    """The path, if it is a page of this daemon; otherwise the start page."""
    path = wanted.partition("?")[0]
    safe = len(wanted) <= _MAX_NEXT and wanted.isascii() and wanted.isprintable() and "\\" not in wanted
    return wanted if safe and _PAGE.fullmatch(path) else "/"


def _login_page(request: Request, following: str, problem: str = "", status: int = 200) -> Response:
    # Links on other sites are followed without the SameSite cookie, even if the user is logged in.
    strange = Headers(scope=request.scope).get("sec-fetch-site") == "cross-site"
    return page(
        "login.html",
        status,
        csrf=request.scope[VISIT].secret,
        next=following,
        problem=problem,
        strange=strange,
    )


def _problem(error: CkptError) -> Response:
    if error.http_status >= 500:
        _LOG.warning("%s: %s", error.code, error)
    return page(
        "problem.html",
        error.http_status,
        title=HTTPStatus(error.http_status).phrase,
        detail=error.message,
        hint=error.hint.rstrip("."),
        status=error.http_status,
        code=error.code,
        request_id=REQUEST_ID.get(),
    )


LIFETIME_S = 8 * 3600
_MAX_SESSIONS = 10_000


class _Session(NamedTuple):
    secret: str
    expires_at: float


class Sessions:
    """Sessions in memory, for one event loop. They hold the token itself, so that revoking it ends them at once."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sessions: OrderedDict[str, _Session] = OrderedDict()

    def begin(self, secret: str) -> str:
        """Start a session for a valid token; returns its id."""
        id = secrets.token_urlsafe(32)
        remember(self._sessions, id, _Session(secret, self._clock() + LIFETIME_S), _MAX_SESSIONS)
        return id

    def secret_of(self, id: str) -> str | None:
        """The token of a session; None if the session is unknown or expired."""
        session = self._sessions.get(id)
        if session is None:
            return None
        if self._clock() >= session.expires_at:
            del self._sessions[id]
            return None
        return session.secret

    def end(self, id: str) -> None:
        """End a session; unknown ids are ignored."""
        self._sessions.pop(id, None)


PREFIX = "/static/"
_MEDIA = {
    "charts.js": "text/javascript",
    "ckptd.css": "text/css",
    "live.js": "text/javascript",
    "page.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
_FILES = {name: (files("ckptd.pages") / "static" / name).read_bytes() for name in _MEDIA}


def static_response(request: Request) -> Response:
    """A static file; browsers revalidate it on each use."""
    name = request.url.path.removeprefix(PREFIX)
    if name not in _FILES:
        return PlainTextResponse("file not found\n", 404)
    headers = {"ETag": f'"{digest(_FILES[name])}"', "Cache-Control": "no-cache"}
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(_FILES[name], 200, headers, _MEDIA[name])


VISIT = "ckptd_visit"
"""The key of the visit in the ASGI scope."""
_MAX_FORM_BYTES = 8 << 10
_MAX_FIELDS = 16


class Visit(NamedTuple):
    """One request of a browser: fields of the visitor of a page, in the same order."""

    secret: str
    """The CSRF token that forms must contain."""
    logged_in: bool
    now: float


def cookie(request: Request, name: str, value: str, max_age_s: int) -> tuple[bytes, bytes]:
    """A Set-Cookie header for a cookie that scripts and other sites cannot read."""
    secure = "; Secure" if request.url.scheme == "https" else ""
    text = f"{name}={value}; Max-Age={max_age_s}; Path=/; HttpOnly; SameSite=Strict{secure}"
    return b"set-cookie", text.encode("ascii")


async def read_form(request: Request) -> dict[str, str]:
    """The fields of a submitted form. Raises InvalidRequest, or Forbidden if another site sent the form."""
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > _MAX_FORM_BYTES:
            raise InvalidRequest(f"the form is larger than {_MAX_FORM_BYTES} bytes", "Check that you pasted a token")
    try:
        fields = parse_qs(data.decode("ascii"), max_num_fields=_MAX_FIELDS, keep_blank_values=True)
    except ValueError as error:
        raise InvalidRequest(f"the form cannot be read: {error}", "Submit the form from its page") from error
    visit: Visit = request.scope[VISIT]
    found = {name: values[0] for name, values in fields.items()}
    if not compare_digest(found.get("csrf", "").encode(), visit.secret.encode()):
        raise Forbidden(
            "the form was not submitted from a page of this daemon", "Reload the page, and allow cookies for it"
        )
    return found
