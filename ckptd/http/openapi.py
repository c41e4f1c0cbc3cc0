"""The OpenAPI document: responses, errors and bodies of every endpoint, with their schemas.

A query parameter that an endpoint does not declare is refused, so that no typing error is ignored.
"""

from __future__ import annotations

from difflib import get_close_matches
from http import HTTPStatus
from types import UnionType
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.dependencies.models import Dependant
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.responses import Response

from ckptapi import bodies
from ckptstore.errors import InvalidRequest

_REF = "#/components/schemas/{name}"
_ALWAYS = (401, 403, 414, 422, 429, 431, 500, 503)
_ABOUT = "Checkpoint storage and restore. docs/how-to/http-api.md explains what is not in the schemas."
_kinds: dict[str, Any] = {}


def documented(
    kind: Any = None,
    *errors: int,
    status: int = 200,
    body: Any = None,
    media: str = "application/json",
    text: bool = False,
    also: dict[int, str] | None = None,
) -> dict[str, Any]:
    """Arguments for a route.

    kind: type of the response body; None without a schema. errors: statuses in addition to those of every endpoint.
    body: type of the request body. media: media type of a response that is not JSON. also: other statuses with their
    descriptions.
    """
    responses: dict[int | str, Any] = {
        status: _response(kind, media, status),
        **{error: _response(bodies.Problem, bodies.PROBLEM, error) for error in sorted({*_ALWAYS, *errors})},
        **{other: {"description": text} for other, text in (also or {}).items()},
    }
    if text:
        responses[status]["content"]["text/plain"] = {"schema": {"type": "string"}}
    route: dict[str, Any] = {"responses": responses, "status_code": status, "response_class": Response}
    if body is not None:
        content = {"application/json": {"schema": _schema(body)}}
        route["openapi_extra"] = {"requestBody": {"required": True, "content": content}}
    return route


def install(app: FastAPI) -> None:
    """Make an app serve the complete document."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = get_openapi(title=app.title, version=app.version, description=_ABOUT, routes=app.routes)
            _, schemas = msgspec.json.schema_components(list(_kinds.values()), ref_template=_REF)
            found["components"] = {
                "schemas": schemas,
                "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            }
            found["security"] = [{"token": []}]
            app.openapi_schema = found
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


async def only_known(request: Request) -> None:
    """A dependency of endpoints. Raises InvalidRequest for a query parameter that the endpoint does not declare."""
    route = request.scope["route"]
    if not request.query_params or not isinstance(route, APIRoute):
        return
    known = sorted(_declared(route.dependant))
    for name in request.query_params:
        if name not in known:
            similar = get_close_matches(name.lower(), known, n=1)
            takes = f"It takes {', '.join(known)}" if known else "It takes none"
            hint = f"Did you mean {similar[0]!r}?" if similar else takes
            raise InvalidRequest(f"{route.path_format} has no query parameter {name[:80]!r}", hint)


def _declared(dependant: Dependant) -> set[str]:
    own = {field.alias for field in dependant.query_params}
    return own.union(*(_declared(child) for child in dependant.dependencies))


def _response(kind: Any, media: str, status: int) -> dict[str, Any]:
    found: dict[str, Any] = {"description": HTTPStatus(status).phrase}
    if kind is not None or (status != 204 and media != "application/json"):
        found["content"] = {media: {"schema": _schema(kind) if kind is not None else {"type": "string"}}}
    return found


def _schema(kind: Any) -> dict[str, Any]:
    members = kind.__args__ if isinstance(kind, UnionType) else (kind,)
    for member in members:
        _kinds[str(member)] = member
    (found,), _ = msgspec.json.schema_components((kind,), ref_template=_REF)
    return found
