"""Endpoints that change something: notify, prune, reindex, leases."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request
from starlette.responses import Response

from ckptapi import bodies
from ckptapi.listing import check_glob
from ckptd.http.access import CallerDep
from ckptd.http.bodies import json_response, read_body
from ckptd.http.context import Ctx
from ckptd.http.openapi import documented
from ckptstore.names import Attempt, Reference, check_run

router = APIRouter()


@router.post(bodies.NOTIFY, **documented(bodies.CheckpointBody, 404, 410, body=bodies.NotifyRequest))
async def notify(request: Request, ctx: Ctx) -> Response:
    """Report a committed attempt: its outcome is read from the store now instead of at the next poll."""
    body = await read_body(request, bodies.NotifyRequest)
    attempt = Attempt.parse(body.attempt)
    found = await ctx.threads.store(ctx.services.store_sync.notify, check_run(body.run), attempt)
    return json_response(bodies.CheckpointBody.of(found))


@router.post(bodies.PRUNE, **documented(bodies.PruneBody, 404, 409, body=bodies.PruneRequest))
async def prune(request: Request, ctx: Ctx, caller: CallerDep) -> Response:
    """Delete the checkpoints that the policy does not keep. A dry run, the default, only lists them."""
    body = await read_body(request, bodies.PruneRequest)
    if body.run is not None:
        check_glob(body.run)
    done = await ctx.threads.store(ctx.services.pruning.prune, body.prune(), body.dry_run, caller.name)
    return json_response(bodies.PruneBody.of(done, body.dry_run))


@router.post(bodies.REINDEX, **documented(bodies.ReindexBody))
async def reindex(ctx: Ctx) -> Response:
    """Read every outcome in the store again."""
    num_runs, num_checkpoints = await ctx.threads.store(ctx.services.store_sync.reindex)
    return json_response(bodies.ReindexBody(runs=num_runs, checkpoints=num_checkpoints))


@router.post(bodies.LEASES, **documented(bodies.LeaseBody, 404, status=201, body=bodies.LeaseRequest))
async def take_lease(request: Request, ctx: Ctx) -> Response:
    """Protect a checkpoint from deletion for `ttl_s` seconds."""
    body = await read_body(request, bodies.LeaseRequest)
    reference = Reference.parse(body.id)
    run, lease = await ctx.threads.store(ctx.services.leases.take, reference, body.holder, body.ttl_s)
    return json_response(bodies.LeaseBody(run=run, lease=lease), 201)


@router.delete(bodies.LEASES + "/{run}/{lease}", **documented(status=204))
async def release_lease(
    ctx: Ctx, run: Annotated[str, Path(max_length=128)], lease: Annotated[str, Path(max_length=26)]
) -> Response:
    """End a lease. Succeeds if the lease is already gone."""
    await ctx.threads.store(ctx.services.leases.release, run, lease)
    return Response(status_code=204)
