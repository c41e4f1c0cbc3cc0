"""Restore sessions: join, report, wait, cancel."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from ckptapi import bodies
from ckptd.api.checkpoints import Limit, RunQuery, Ulid
from ckptd.http.access import CallerDep
from ckptd.http.bodies import json_response, read_body
from ckptd.http.concurrency import happens
from ckptd.http.context import Context, Ctx
from ckptd.http.openapi import documented
from ckptd.index import Restore
from ckptd.services.tokens import Caller
from ckptstore.format.decoding import convert

router = APIRouter()


@router.post(
    bodies.RESTORES,
    **documented(
        bodies.RestoreBody, 404, 409, status=201, body=bodies.RestoreRequest, also={200: "Joined an existing session"}
    ),
)
async def join(request: Request, ctx: Ctx, caller: CallerDep) -> Response:
    """Join the restore of a job. The first rank resolves the checkpoint (201), the others get the same one (200).

    Only the token of the first rank, or one with scope prune, may join, report and cancel.
    """
    body = await read_body(request, bodies.RestoreRequest)
    restore, created = await _join(ctx, body, caller)
    view = await ctx.with_index(ctx.restores.view, restore.id, False)
    return json_response(view, 201 if created else 200)


@router.put(bodies.RESTORES + "/{id}/ranks/{rank}", **documented(bodies.RestoreStatus, 404, body=bodies.RankReport))
async def report(
    request: Request, ctx: Ctx, id: Ulid, rank: Annotated[int, Path(ge=0, lt=bodies.MAX_WORLD_SIZE)]
) -> Response:
    """Report the progress of a rank. Returns the status of the session, also after it has ended."""
    body = await read_body(request, bodies.RankReport)
    restore = await ctx.with_index(ctx.restores.report, id, rank, body)
    return json_response(convert(restore, bodies.RestoreStatus, from_attributes=True))


@router.get(bodies.RESTORES + "/{id}", **documented(bodies.RestoreBody, 404))
async def restore(
    ctx: Ctx,
    id: Ulid,
    wait: Annotated[
        float, Query(ge=0, le=bodies.MAX_WAIT_S, description="Seconds to wait for the end of the session")
    ] = 0,
    ranks: Annotated[bool, Query(description="List the ranks, and detect stragglers")] = True,
) -> Response:
    """One session. With `wait`, the response is delayed until the session has ended or the time is up."""
    restores = ctx.restores
    if wait:
        with ctx.waiting.listen(id) as ended:
            if (await ctx.with_index(restores.find, id)).live:
                await happens(ended, wait)
    return json_response(await ctx.with_index(restores.view, id, ranks))


@router.get(bodies.RESTORES, **documented(bodies.Items[bodies.RestoreBody]))
async def newest(ctx: Ctx, run: RunQuery = None, limit: Limit = 100) -> Response:
    """Sessions of one run or all runs, newest first, without their ranks."""
    found = await ctx.with_index(ctx.restores.newest, run, limit)
    return json_response(bodies.Items(found))


@router.delete(bodies.RESTORES + "/{id}", **documented(bodies.RestoreBody, 404))
async def cancel(ctx: Ctx, id: Ulid) -> Response:
    """End a session and release its lease. A session that has ended is not changed."""
    restore = await ctx.with_store(ctx.restores.cancel, id)
    return json_response(await ctx.with_index(ctx.restores.view, restore.id, True))


async def _join(ctx: Context, body: bodies.RestoreRequest, caller: Caller) -> tuple[Restore, bool]:
    restores = ctx.restores
    if joined := await ctx.with_index(restores.join, body, caller.check_owner):
        return joined, False
    # A thousand ranks may join at once: one of them reads the store; the others wait here without using a thread.
    async with ctx.locks.of(f"{body.run}/{body.key}"):
        if joined := await ctx.with_index(restores.join, body, caller.check_owner):
            return joined, False
        return await ctx.with_store(restores.open, body, caller.name, caller.check_owner)
