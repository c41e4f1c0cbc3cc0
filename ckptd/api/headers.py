"""Headers that tell browsers what not to do with our answers."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders

_NOTHING = "default-src 'none'; frame-ancestors 'none'"
_PAGE = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)


def secure(headers: MutableHeaders, https: bool) -> None:
    """Add them to an answer. There are none for other origins: no other site may read anything."""
    page = headers.get("content-type", "").startswith("text/html")
    headers["Content-Security-Policy"] = _PAGE if page else _NOTHING
    headers["X-Content-Type-Options"] = "nosniff"
    headers["Referrer-Policy"] = "no-referrer"
    headers["Cross-Origin-Resource-Policy"] = "same-origin"
    if https:
        headers["Strict-Transport-Security"] = "max-age=31536000"
