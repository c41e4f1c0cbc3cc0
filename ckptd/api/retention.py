"""Retention: prunes, deletion and undeletion, pins, leases, policies, and the audit log."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request
from starlette.responses import Response

from ckptapi import bodies
from ckptapi.listing import check_glob
from ckptd.api.checkpoints import ONE, Limit, RequiredRun, RunName, Ulid
from ckptd.http.access import OF_TOKEN, CallerDep
from ckptd.http.bodies import json_response, read_body
from ckptd.http.context import Ctx, Found, Ref
from ckptd.http.openapi import documented
from ckptstore.commits.audit import AuditEntry
from ckptstore.commits.labels import LabelChange
from ckptstore.names import Reference
from ckptstore.operator import StoreOperator
from ckptstore.retention.deletion import SWEEP_GRACE_S, Deleted
from ckptstore.retention.pins import NamedPin
from ckptstore.retention.policy import PoliciesInForce
from ckptstore.retention.pruning import Prune

router = APIRouter()

PinName = Annotated[str, Path(max_length=128)]
ReasonQuery = Annotated[str, Query(max_length=1000, description="For the audit log")]
Grace = Annotated[
    float | None,
    Query(
        ge=0, le=365 * 24 * 3600, description="Seconds during which it can be undeleted; default: a day; 0: not at all"
    ),
]
Force = Annotated[bool, Query(description="Delete it even if it is the newest checkpoint of its run")]


async def _operator(ctx: Ctx, caller: CallerDep) -> StoreOperator:
    return ctx.operator(caller.name)


Operator = Annotated[StoreOperator, Depends(_operator)]
"""Acts for the caller."""


@router.delete(ONE, **documented(None, 404, 409, status=204))
async def delete(
    ctx: Ctx, operator: Operator, found: Found, reason: ReasonQuery = "", grace_s: Grace = None, force: Force = False
) -> None:
    """Hide a checkpoint now, and delete it after the grace period.

    409 if a lease or pin holds it, or if it is the newest one of its run and the deletion is not forced.
    """
    grace_s = SWEEP_GRACE_S if grace_s is None else grace_s
    await ctx.with_store(operator.delete, found, grace_s, reason, force)


@router.post(ONE + "/undelete", **documented(bodies.CheckpointBody, 404, 410, body=bodies.UndeleteRequest))
async def undelete(request: Request, ctx: Ctx, operator: Operator, reference: Ref) -> Response:
    """Undo a deletion, and pin the checkpoint as `undeleted`. 410 if the deletion of its data has begun."""
    body = await read_body(request, bodies.UndeleteRequest)
    found = await ctx.with_store(operator.undelete, reference, body.reason)
    return json_response(bodies.CheckpointBody.of(found))


@router.post(bodies.PRUNE, **documented(bodies.PruneBody, 404, 409, body=Prune))
async def prune(request: Request, ctx: Ctx, operator: Operator) -> Response:
    """Delete the checkpoints that the policy does not keep. A dry run, the default, only lists them.

    The plan is made from the store, never from the index, so that a stale index cannot cause deletions.
    """
    wanted = await read_body(request, Prune)
    if wanted.run is not None:
        check_glob(wanted.run)
    plan = await ctx.with_store(operator.plan_prune, wanted)
    if not wanted.dry_run:
        plan = await ctx.with_store(operator.prune, wanted, plan)
        await ctx.with_index(ctx.events.pruned, plan.remove)
    return json_response(bodies.PruneBody.of(plan, wanted.dry_run))


@router.post(bodies.LEASES, **documented(bodies.LeaseBody, 404, status=201, body=bodies.LeaseRequest))
async def take_lease(request: Request, ctx: Ctx, caller: CallerDep) -> Response:
    """Protect a checkpoint from deletion for `ttl_s` seconds. Only this token, or one with scope prune, may end it."""
    body = await read_body(request, bodies.LeaseRequest)
    found = await ctx.with_index(ctx.catalog.find, Reference.parse(body.id))
    holder = f"{caller.name}{OF_TOKEN}{body.holder}"
    found = replace(found, thinned=body.thinned)
    lease = await ctx.with_store(ctx.source.take_lease, found, holder, body.ttl_s)
    return json_response(bodies.LeaseBody(run=found.run, lease=lease), 201)


@router.delete(bodies.LEASES + "/{run:path}/{lease}", **documented(status=204))
async def release_lease(ctx: Ctx, run: RunName, lease: Ulid) -> None:
    """End a lease. Succeeds if the lease is already gone."""
    await ctx.with_store(ctx.source.release_lease, run, lease)


@router.put(ONE + "/pins/{name}", **documented(NamedPin, 404))
async def pin(ctx: Ctx, operator: Operator, found: Found, name: PinName, reason: ReasonQuery = "") -> Response:
    """Keep a checkpoint until the pin is removed. Succeeds if the pin exists already."""
    await ctx.with_store(operator.pin, found, name, reason)
    return json_response(NamedPin(id=found.id, name=name))


@router.delete(ONE + "/pins/{name}", **documented(None, 404, status=204))
async def unpin(ctx: Ctx, operator: Operator, found: Found, name: PinName) -> None:
    """Remove a pin. Succeeds if the pin is already gone."""
    await ctx.with_store(operator.unpin, found, name)


@router.patch(ONE, **documented(bodies.CheckpointBody, 404, body=bodies.LabelsRequest))
async def label(request: Request, ctx: Ctx, operator: Operator, found: Found) -> Response:
    """Set tags and metrics; null removes one. Those that are not named stay."""
    body = await read_body(request, bodies.LabelsRequest)
    change = LabelChange(body.tags, body.metrics)
    changed = await ctx.with_store(operator.label, found, change, body.reason)
    return json_response(bodies.CheckpointBody.of(changed))


@router.get(bodies.PINS, **documented(bodies.Items[NamedPin]))
async def pins(ctx: Ctx, operator: Operator, run: RequiredRun) -> Response:
    """All pins of a run, newest step first."""
    return json_response(bodies.Items(await ctx.with_store(operator.pins, run)))


@router.get(bodies.DELETED, **documented(bodies.Items[Deleted]))
async def deleted(ctx: Ctx, operator: Operator, run: RequiredRun) -> Response:
    """Deleted checkpoints of a run that can be undeleted, newest step first."""
    return json_response(bodies.Items(await ctx.with_store(operator.deleted, run)))


@router.get(bodies.AUDIT, **documented(bodies.Items[AuditEntry]))
async def audit(ctx: Ctx, operator: Operator, run: RequiredRun, limit: Limit = 100) -> Response:
    """The audit log of a run, newest first: who started which action on which checkpoints, when and why."""
    return json_response(bodies.Items(await ctx.with_store(operator.audit, run, limit)))


@router.get(bodies.POLICIES, **documented(PoliciesInForce))
async def policies(ctx: Ctx, operator: Operator) -> Response:
    """The retention policies in force; version 0 if they were never set."""
    return json_response(await ctx.with_store(operator.policies))


@router.get(bodies.POLICIES + "/history", **documented(bodies.Items[PoliciesInForce]))
async def history(ctx: Ctx, operator: Operator, limit: Limit = 100) -> Response:
    """The versions of the policies, newest first."""
    return json_response(bodies.Items(await ctx.with_store(operator.policies_history, limit)))


@router.put(bodies.POLICIES, **documented(PoliciesInForce, 409, body=bodies.PoliciesRequest))
async def change(request: Request, ctx: Ctx, operator: Operator) -> Response:
    """Replace the policies. 409 if `expected` is not the version in force."""
    body = await read_body(request, bodies.PoliciesRequest)
    done = await ctx.with_store(operator.change_policies, body.policies, body.expected, body.reason)
    return json_response(done)
