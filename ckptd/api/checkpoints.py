"""Read endpoints: checkpoints, their contents, and their stored objects."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import PlainTextResponse, Response

from ckptapi import bodies
from ckptd.http.access import CallerDep
from ckptd.http.bodies import json_response, read_body
from ckptd.http.concurrency import happens
from ckptd.http.context import Context, Ctx, Found, Ref
from ckptd.http.listing import ListingQuery, write_cursor
from ckptd.http.openapi import documented
from ckptd.http.streaming import MEDIA_TYPE, client_of, matches, object_response
from ckptd.index import RunSummary
from ckptd.services.events import CHECKPOINTS
from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import NoCheckpoint
from ckptstore.names import Attempt, RunKeys, check_run

router = APIRouter()

ONE = bodies.CHECKPOINTS + "/{id:checkpoint}"
"""The path of one checkpoint."""
_NOT_MODIFIED = {304: "If-None-Match contains its ETag"}
_LATEST = documented(bodies.CheckpointBody, 404, text=True, also=_NOT_MODIFIED)
_OBJECT = documented(None, 404, 416, media=MEDIA_TYPE, also={206: "The requested range", **_NOT_MODIFIED})
Limit = Annotated[int, Query(ge=1, le=bodies.MAX_PAGE)]
Rank = Annotated[int, Path(ge=0, le=99_999)]
Ulid = Annotated[str, Path(max_length=26)]
RequiredRun = Annotated[str, Query(max_length=128)]
RunQuery = Annotated[str | None, Query(max_length=128, description="One run only")]
RunName = Annotated[str, Path(max_length=128)]
FormatQuery = Annotated[
    Literal["json", "text", "id", "step", "env"] | None, Query(description="Without it, Accept chooses json or id")
]
Wait = Annotated[float, Query(ge=0, le=bodies.MAX_WAIT_S, description="Seconds to wait for a newer checkpoint")]


@router.get("/checkpoints/latest", **_LATEST)
@router.get(bodies.LATEST, **_LATEST)
async def latest(
    request: Request, ctx: Ctx, run: RunQuery = None, format: FormatQuery = None, wait: Wait = 0
) -> Response:
    """The newest checkpoint of a run; `run` may be left out if only one run has checkpoints. The ETag is the
    manifest's digest.

    With `wait`, the response is delayed until the ETag differs from If-None-Match, or the time is up. Formats other
    than json are lines of text: the id (`id` or `text`), the step, or variables for a shell (`env`). Without `format`,
    `Accept: text/plain` requests the id.
    """
    run = check_run(run) if run is not None else None
    known = request.headers.get("if-none-match")
    if wait:
        with ctx.wait_limit.use(client_of(request)):
            found = await _awaited(ctx, run, known, wait)
    else:
        found = await _latest(ctx, run)
    headers = {"ETag": _etag(found), "Cache-Control": "no-cache", "Vary": "Accept"}
    if matches(known, headers["ETag"]):
        return Response(status_code=304, headers=headers)
    format = format or ("id" if _prefers_text(request.headers.get("accept", "")) else "json")
    if format != "json":
        return PlainTextResponse(_as_text(found, format), headers=headers)
    return json_response(bodies.CheckpointBody.of(found), headers=headers)


@router.get(bodies.CHECKPOINTS, **documented(bodies.Page))
async def page(request: Request, ctx: Ctx, caller: CallerDep, query: ListingQuery, limit: Limit = 100) -> Response:
    """Checkpoints that match all filters, in pages. A page may be short or empty and still have a next one."""
    found = await ctx.with_index(ctx.catalog.page, query.filter(caller), query.sort, query.place(), limit)
    cursor = write_cursor(query.sort, found.next) if found.next is not None else None
    headers = {}
    if cursor is not None:
        others = [item for item in request.query_params.multi_items() if item[0] != "cursor"]
        headers["Link"] = f'<{bodies.CHECKPOINTS}?{urlencode([*others, ("cursor", cursor)])}>; rel="next"'
    return json_response(
        bodies.Page([bodies.CheckpointBody.of(item) for item in found.checkpoints], cursor), headers=headers
    )


@router.get(bodies.RUNS, **documented(bodies.Items[bodies.RunBody]))
async def runs(ctx: Ctx, caller: CallerDep) -> Response:
    """All runs, with their sizes and newest checkpoints."""
    found = await ctx.with_index(ctx.catalog.runs)
    return json_response(bodies.Items([_run(one) for one in found if caller.sees(one.run)]))


@router.get(bodies.RUNS + "/{run:path}", **documented(bodies.RunBody, 404))
async def run(ctx: Ctx, run: RunName) -> Response:
    """One run, with its size and newest checkpoint."""
    for summary in await ctx.with_index(ctx.catalog.runs):
        if summary.run == run:
            return json_response(_run(summary))
    raise NoCheckpoint(f"run {run!r} has no checkpoint", "GET /v1/runs lists the runs")


@router.get(ONE, **documented(bodies.CheckpointBody, 404))
async def checkpoint(found: Found) -> Response:
    """One checkpoint."""
    return json_response(bodies.CheckpointBody.of(found))


@router.get(ONE + "/shards", **documented(bodies.Items[bodies.ShardBody], 404))
async def shards(ctx: Ctx, reference: Ref) -> Response:
    """The shards of a checkpoint, by rank."""
    return json_response(await ctx.with_store(ctx.contents.shards, reference))


@router.get(ONE + "/entries", **documented(bodies.EntriesBody, 404))
async def entries(
    ctx: Ctx,
    reference: Ref,
    offset: Annotated[int, Query(ge=0, lt=1 << 40)] = 0,
    limit: Annotated[int, Query(ge=1, le=bodies.MAX_ENTRIES)] = 1000,
) -> Response:
    """A page of the entries of a checkpoint."""
    return json_response(await ctx.with_store(ctx.contents.entries, reference, offset, limit))


@router.get(ONE + "/manifest", **_OBJECT)
async def manifest(request: Request, ctx: Ctx, reference: Ref) -> Response:
    """The stored manifest: zstd-compressed JSON."""
    return await object_response(request, ctx, ctx.objects.find, reference, RunKeys.manifest)


@router.get(ONE + "/receipts/{rank}", **_OBJECT)
async def receipt(request: Request, ctx: Ctx, reference: Ref, rank: Rank) -> Response:
    """The stored receipt of a rank."""
    return await object_response(request, ctx, ctx.objects.find, reference, RunKeys.receipt, rank)


@router.get(ONE + "/statistics/{rank}", **_OBJECT)
async def statistics(request: Request, ctx: Ctx, reference: Ref, rank: Rank) -> Response:
    """The stored statistics of the shard of a rank. 404 also if the checkpoint was saved without."""
    return await object_response(request, ctx, ctx.objects.statistics, reference, rank)


@router.get(ONE + "/shards/{name}", **_OBJECT)
async def shard(request: Request, ctx: Ctx, reference: Ref, name: Annotated[str, Path(max_length=32)]) -> Response:
    """A shard, or one range of its bytes."""
    return await object_response(request, ctx, ctx.objects.find, reference, RunKeys.shard, name)


@router.post(bodies.NOTIFY, **documented(bodies.CheckpointBody, 404, 410, body=bodies.NotifyRequest))
async def notify(request: Request, ctx: Ctx) -> Response:
    """Report a committed attempt: its outcome is read from the store now instead of at the next poll."""
    body = await read_body(request, bodies.NotifyRequest)
    attempt = Attempt.parse(body.attempt)
    found = await ctx.with_store(ctx.store_sync.notify, check_run(body.run), attempt)
    return json_response(bodies.CheckpointBody.of(found))


@router.post(bodies.REINDEX, **documented(bodies.ReindexBody))
async def reindex(ctx: Ctx) -> Response:
    """Read every outcome in the store again."""
    num_runs, num_checkpoints = await ctx.with_store(ctx.store_sync.reindex)
    return json_response(bodies.ReindexBody(runs=num_runs, checkpoints=num_checkpoints))


async def _latest(ctx: Context, run: str | None) -> Checkpoint:
    found = ctx.catalog.cached_latest(run)
    return found if found is not None else await ctx.with_index(ctx.catalog.latest, run)


async def _awaited(ctx: Context, run: str | None, known: str | None, wait: float) -> Checkpoint:
    deadline = asyncio.get_running_loop().time() + wait
    with ctx.waiting.listen(CHECKPOINTS if run is None else f"{CHECKPOINTS}/{run}") as changed:
        while True:
            changed.clear()
            left = deadline - asyncio.get_running_loop().time()
            over = left <= 0 or ctx.waiting.closed
            try:
                found = await _latest(ctx, run)
                if over or not matches(known, _etag(found)):
                    return found
            except NoCheckpoint:
                if over:
                    raise
            await happens(changed, left)


def _run(summary: RunSummary) -> bodies.RunBody:
    return bodies.RunBody(
        run=summary.run,
        num_checkpoints=summary.num_checkpoints,
        stored_bytes=summary.stored_bytes,
        latest=bodies.CheckpointBody.of(summary.latest) if summary.latest else None,
    )


def _prefers_text(accept: str) -> bool:
    """Whether an Accept header names text/plain, and does not name JSON."""
    kinds = [kind.partition(";")[0].strip().lower() for kind in accept.split(",")]
    return "text/plain" in kinds and "application/json" not in kinds


def _as_text(found: Checkpoint, format: str) -> str:
    """The answer for shells. Names of runs, steps and ULIDs need no quotes."""
    if format == "step":
        return f"{found.step}\n"
    if format == "env":
        body = bodies.CheckpointBody.of(found)
        values = {"ID": found.id, "RUN": found.run, "STEP": found.step, "COMMITTED": body.committed}
        return "".join(f"CKPT_{name}={value}\n" for name, value in values.items())
    return f"{found.id}\n"


def _etag(checkpoint: Checkpoint) -> str:
    return f'"{checkpoint.manifest_digest}"'
