"""Tokens, for admins: list, create, rotate, revoke."""

from __future__ import annotations

import logging
from typing import Annotated

from fastapi import APIRouter, Path, Request
from starlette.responses import Response

from ckptapi import bodies
from ckptd.http.access import CallerDep
from ckptd.http.bodies import json_response, read_body
from ckptd.http.context import Ctx
from ckptd.http.openapi import documented

router = APIRouter()

_LOG = logging.getLogger(__name__)
_SECRET = {"Cache-Control": "no-store"}
TokenName = Annotated[str, Path(max_length=64)]


@router.get(bodies.TOKENS, **documented(bodies.Items[bodies.TokenBody]))
async def tokens(ctx: Ctx) -> Response:
    """All tokens, by name, without their secrets."""
    return json_response(bodies.Items(await ctx.with_index(ctx.tokens.list)))


@router.post(bodies.TOKENS, **documented(bodies.NewTokenBody, 404, 409, status=201, body=bodies.TokenRequest))
async def create(request: Request, ctx: Ctx, caller: CallerDep) -> Response:
    """Create a token. The secret is returned here only, and stored nowhere."""
    body = await read_body(request, bodies.TokenRequest)
    made = await ctx.with_index(ctx.tokens.create, body, caller.name)
    _LOG.info("token %r was created by %r, scopes %s, runs %s", body.name, caller.name, body.scopes, body.runs or "all")
    return json_response(made, 201, _SECRET)


@router.post(bodies.TOKENS + "/{name}/rotate", **documented(bodies.NewTokenBody, 404, body=bodies.RotateRequest))
async def rotate(request: Request, ctx: Ctx, caller: CallerDep, name: TokenName) -> Response:
    """Give a token a new secret."""
    body = await read_body(request, bodies.RotateRequest)
    made = await ctx.with_index(ctx.tokens.rotate, name, body)
    _LOG.info("token %r was rotated by %r", name, caller.name)
    return json_response(made, headers=_SECRET)


@router.delete(bodies.TOKENS + "/{name}", **documented(None, 404, status=204))
async def revoke(ctx: Ctx, caller: CallerDep, name: TokenName) -> None:
    """Revoke a token; it is refused from now on."""
    await ctx.with_index(ctx.tokens.revoke, name)
    _LOG.info("token %r was revoked by %r", name, caller.name)
