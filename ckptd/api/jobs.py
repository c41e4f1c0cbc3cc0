"""Jobs: start, show, cancel. Live uploads, and the probe of the store."""

from __future__ import annotations

from typing import Any, cast

from fastapi import APIRouter, Request
from msgspec.structs import replace
from starlette.responses import Response

from ckptapi import bodies
from ckptapi.listing import check_glob
from ckptd.api.checkpoints import Limit, RequiredRun, RunQuery, Ulid
from ckptd.http.access import CallerDep
from ckptd.http.bodies import json_response, read_body
from ckptd.http.context import Ctx
from ckptd.http.openapi import documented
from ckptstore.analysis.goodput import Account
from ckptstore.stores.checks import StoreReport

router = APIRouter()


@router.post(bodies.JOBS, **documented(bodies.JobBody, 404, status=202, body=bodies.JobRequest))
async def start(request: Request, ctx: Ctx, caller: CallerDep) -> Response:
    """Start a job: verify, heal or gc. Location is the URL of the job."""
    body = await read_body(request, cast(type[Any], bodies.JobRequest))
    if getattr(body, "run", None) is not None:
        check_glob(body.run)
    job = await ctx.with_index(ctx.jobs.submit, body, caller.name)
    return json_response(job, 202, {"Location": f"{bodies.JOBS}/{job.id}"})


@router.get(bodies.JOBS, **documented(bodies.Items[bodies.JobBody]))
async def newest(ctx: Ctx, limit: Limit = 100) -> Response:
    """Jobs, newest first, without their logs."""
    found = await ctx.with_index(ctx.jobs.newest, limit)
    return json_response(bodies.Items([replace(job, log=None) for job in found]))


@router.get(bodies.JOBS + "/{id}", **documented(bodies.JobBody, 404))
async def job(ctx: Ctx, id: Ulid) -> Response:
    """One job, with the last lines of its log."""
    return json_response(await ctx.with_index(ctx.jobs.find, id))


@router.delete(bodies.JOBS + "/{id}", **documented(bodies.JobBody, 404))
async def cancel(ctx: Ctx, id: Ulid) -> Response:
    """Cancel a job; its effects so far remain. A job that has ended is not changed."""
    return json_response(await ctx.with_index(ctx.jobs.cancel, id))


@router.get(bodies.ATTEMPTS, **documented(bodies.Items[bodies.AttemptBody]))
async def attempts(ctx: Ctx, run: RunQuery = None) -> Response:
    """Live uploads: attempts of one run or all runs that are neither committed nor aborted, oldest first."""
    return json_response(bodies.Items(await ctx.with_store(ctx.uploads, run)))


@router.get(bodies.GOODPUT, **documented(Account, 404))
async def goodput(ctx: Ctx, run: RequiredRun) -> Response:
    """A breakdown of a run's wall-clock time, by category and by attempt of the job."""
    return json_response(await ctx.with_store(ctx.accounts.of_run, run))


@router.post(bodies.PROBE, **documented(StoreReport))
async def probe(ctx: Ctx) -> Response:
    """Check the store with a few small objects: conditional writes, clock, speed."""
    async with ctx.locks.of("probe"):
        return json_response(await ctx.with_store(ctx.probe))
