"""Decisions for stores whose create-only writes overwrite."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from ckptapi import bodies
from ckptapi.bodies import Scope
from ckptd.http.access import CallerDep
from ckptd.http.bodies import json_response, read_body
from ckptd.http.context import Ctx
from ckptd.http.openapi import documented
from ckptd.services.remote_create import Proposal

router = APIRouter()
_MAX_BODY_BYTES = 1 << 20


@router.post(bodies.DECISIONS, **documented(bodies.DecisionBody, 404, body=bodies.DecisionRequest))
async def decide(request: Request, ctx: Ctx, caller: CallerDep) -> Response:
    """Decide an attempt, a tombstone or a generation for good: every request returns the first proposal."""
    body = await read_body(request, bodies.DecisionRequest, _MAX_BODY_BYTES)
    proposal = Proposal.parse(body)
    if proposal.deletes and not await ctx.with_store(proposal.is_superseded, ctx.store):
        caller.check_scope(Scope.PRUNE)
    decided = await ctx.with_store(proposal.decide, ctx.store)
    return json_response(bodies.DecisionBody(document=decided.decode()))
