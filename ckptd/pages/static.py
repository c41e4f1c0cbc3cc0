"""The style sheet, the script and the icon: read once, served by the daemon itself."""

from __future__ import annotations

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ckptstore.format.documents import digest

PREFIX = "/static/"
_MEDIA = {"ckptd.css": "text/css", "live.js": "text/javascript", "icon.svg": "image/svg+xml"}
_FILES = {name: (files("ckptd.pages") / "static" / name).read_bytes() for name in _MEDIA}


def static_response(request: Request) -> Response:
    """One of the files; browsers ask each time whether theirs is still the same."""
    name = request.url.path.removeprefix(PREFIX)
    if name not in _FILES:
        return PlainTextResponse("there is no such file\n", 404)
    headers = {"ETag": f'"{digest(_FILES[name])}"', "Cache-Control": "no-cache"}
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(_FILES[name], 200, headers, _MEDIA[name])
