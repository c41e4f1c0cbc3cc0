"""Retention: pins, deletion and undeletion, policies, and the audit log."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from ckptapi import bodies
from ckptd.api.checkpoints import CheckpointId
from ckptd.http.access import CallerDep
from ckptd.http.bodies import json_response, read_body
from ckptd.http.context import Ctx
from ckptd.http.openapi import documented
from ckptstore.commits.labels import LabelChange
from ckptstore.names import Reference
from ckptstore.retention.pins import NamedPin
from ckptstore.retention.policy import PoliciesInForce

router = APIRouter()

_ONE = bodies.CHECKPOINTS + "/{id}"
PinName = Annotated[str, Path(max_length=128)]
RequiredRun = Annotated[str, Query(max_length=128)]
ReasonQuery = Annotated[str, Query(max_length=1000, description="For the audit log")]
Grace = Annotated[
    float | None,
    Query(
        ge=0, le=365 * 24 * 3600, description="Seconds during which it can be undeleted; default: a day; 0: not at all"
    ),
]
Force = Annotated[bool, Query(description="Delete it even if it is the newest checkpoint of its run")]
Limit = Annotated[int, Query(ge=1, le=bodies.MAX_PAGE)]


@router.delete(_ONE, **documented(None, 404, 409, status=204))
async def delete(
    ctx: Ctx, caller: CallerDep, id: CheckpointId, reason: ReasonQuery = "", grace_s: Grace = None, force: Force = False
) -> Response:
    """Hide a checkpoint now, and delete it after the grace period.

    409 if a lease or pin holds it, or if it is the newest one of its run and the deletion is not forced.
    """
    retention = ctx.services.retention
    await ctx.threads.store(retention.delete, Reference.parse(id), caller.name, reason, grace_s, force)
    return Response(status_code=204)


@router.post(_ONE + "/undelete", **documented(bodies.CheckpointBody, 404, 410, body=bodies.UndeleteRequest))
async def undelete(request: Request, ctx: Ctx, caller: CallerDep, id: CheckpointId) -> Response:
    """Undo a deletion, and pin the checkpoint as `undeleted`. 410 if the deletion of its data has begun."""
    body = await read_body(request, bodies.UndeleteRequest)
    retention = ctx.services.retention
    found = await ctx.threads.store(retention.undelete, Reference.parse(id), caller.name, body.reason)
    return json_response(bodies.CheckpointBody.of(found))


@router.put(_ONE + "/pins/{name}", **documented(NamedPin, 404))
async def pin(ctx: Ctx, caller: CallerDep, id: CheckpointId, name: PinName, reason: ReasonQuery = "") -> Response:
    """Keep a checkpoint until the pin is removed. Succeeds if the pin exists already."""
    retention = ctx.services.retention
    return json_response(await ctx.threads.store(retention.pin, Reference.parse(id), name, caller.name, reason))


@router.delete(_ONE + "/pins/{name}", **documented(None, 404, status=204))
async def unpin(ctx: Ctx, caller: CallerDep, id: CheckpointId, name: PinName) -> Response:
    """Remove a pin. Succeeds if the pin is already gone."""
    await ctx.threads.store(ctx.services.retention.unpin, Reference.parse(id), name, caller.name)
    return Response(status_code=204)


@router.patch(_ONE, **documented(bodies.CheckpointBody, 404, body=bodies.LabelsRequest))
async def label(request: Request, ctx: Ctx, caller: CallerDep, id: CheckpointId) -> Response:
    """Set tags and metrics; null removes one. Those that are not named stay."""
    body = await read_body(request, bodies.LabelsRequest)
    change = LabelChange(body.tags, body.metrics)
    retention = ctx.services.retention
    found = await ctx.threads.store(retention.label, Reference.parse(id), change, caller.name, body.reason)
    return json_response(bodies.CheckpointBody.of(found))


@router.get(bodies.PINS, **documented(bodies.PinsBody))
async def pins(ctx: Ctx, run: RequiredRun) -> Response:
    """All pins of a run, newest step first."""
    return json_response(bodies.PinsBody(await ctx.threads.store(ctx.services.retention.operator().pins, run)))


@router.get(bodies.DELETED, **documented(bodies.DeletedListBody))
async def deleted(ctx: Ctx, run: RequiredRun) -> Response:
    """Deleted checkpoints of a run that can be undeleted, newest step first."""
    return json_response(
        bodies.DeletedListBody(await ctx.threads.store(ctx.services.retention.operator().deleted, run))
    )


@router.get(bodies.AUDIT, **documented(bodies.AuditListBody))
async def audit(ctx: Ctx, run: RequiredRun, limit: Limit = 100) -> Response:
    """The audit log of a run, newest first: who started which action on which checkpoints, when and why."""
    audit = ctx.services.retention.operator().audit
    return json_response(bodies.AuditListBody(await ctx.threads.store(audit, run, limit)))


@router.get(bodies.POLICIES, **documented(PoliciesInForce))
async def policies(ctx: Ctx) -> Response:
    """The retention policies in force; version 0 if they were never set."""
    return json_response(await ctx.threads.store(ctx.services.retention.operator().policies))


@router.get(bodies.POLICIES + "/history", **documented(bodies.PoliciesListBody))
async def history(ctx: Ctx, limit: Limit = 100) -> Response:
    """The versions of the policies, newest first."""
    history = ctx.services.retention.operator().policies_history
    return json_response(bodies.PoliciesListBody(await ctx.threads.store(history, limit)))


@router.put(bodies.POLICIES, **documented(PoliciesInForce, 409, body=bodies.PoliciesRequest))
async def change(request: Request, ctx: Ctx, caller: CallerDep) -> Response:
    """Replace the policies. 409 if `expected` is not the version in force."""
    body = await read_body(request, bodies.PoliciesRequest)
    return json_response(await ctx.threads.store(ctx.services.retention.change_policies, body, caller.name))
