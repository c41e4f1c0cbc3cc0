"""Errors as application/problem+json, with the codes of ckptstore.errors and a few for HTTP errors."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ckptapi import bodies
from ckptd.logs import REQUEST_ID
from ckptstore.errors import CkptError, InvalidRequest, Unavailable

_RETRY_AFTER_S = 5
_HTTP_CODES = {404: "unknown_route", 405: "method_not_allowed"}


def problem_response(
    status: int,
    code: str,
    detail: str,
    hint: str = "",
    retryable: bool = False,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """An error response."""
    body = bodies.Problem(
        type=f"urn:ckptd:error:{code}",
        title=HTTPStatus(status).phrase,
        status=status,
        detail=detail,
        code=code,
        hint=hint,
        request_id=REQUEST_ID.get(),
        retryable=retryable,
    )
    retry = {"Retry-After": str(_RETRY_AFTER_S)} if retryable else {}
    return Response(msgspec.json.encode(body), status, {**retry, **(headers or {})}, bodies.PROBLEM)


def error_response(error: CkptError) -> Response:
    """The response for a CkptError."""
    retryable = isinstance(error, Unavailable)
    return problem_response(error.http_status, error.code, error.message, error.hint, retryable)


def install(app: FastAPI) -> None:
    """Format the framework's own errors the same way. The middleware handles CkptError."""

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return error_response(
            InvalidRequest(f"{where}: {first['msg']}", "See docs/how-to/http-api.md or /openapi.json")
        )

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        code = _HTTP_CODES.get(error.status_code, "invalid_request")
        detail = f"{request.method} {request.url.path}: {error.detail}"
        return problem_response(error.status_code, code, detail, "See /openapi.json", headers=error.headers)
