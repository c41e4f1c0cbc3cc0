"""Reading: which checkpoints there are, and their objects."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import PlainTextResponse, Response

from ckptd.api.bodies import json_response
from ckptd.api.context import Given
from ckptd.api.cursors import read_cursor, write_cursor
from ckptd.api.streaming import matches, object_response
from ckptd.index import Position
from ckptstore import wire
from ckptstore.catalog import Checkpoint
from ckptstore.names import Reference, check_run

router = APIRouter()

_MAX_CURSOR = 512
_MAX_ID = 200
RunQuery = Annotated[str | None, Query(max_length=128)]
Id = Annotated[str, Path(max_length=_MAX_ID, description="RUN@STEP, RUN@STEP.ULID or RUN@latest")]


@router.get("/checkpoints/latest")
@router.get(wire.LATEST)
async def latest(
    request: Request, given: Given, run: RunQuery = None, format: Literal["json", "text"] = "json"
) -> Response:
    """The newest checkpoint of a run; without a run, the one committed last. The ETag is the manifest's digest."""
    run = check_run(run) if run is not None else None
    found = await given.threads.index(given.services.catalogue.latest, run)
    headers = {"ETag": f'"{found.manifest_digest}"', "Cache-Control": "no-cache"}
    if matches(request.headers.get("if-none-match"), headers["ETag"]):
        return Response(status_code=304, headers=headers)
    if format == "text":
        return PlainTextResponse(f"{found.id}\n", headers=headers)
    return json_response(wire.CheckpointBody.of(found), headers=headers)


@router.get(wire.CHECKPOINTS)
async def page(
    given: Given,
    run: RunQuery = None,
    limit: Annotated[int, Query(ge=1, le=wire.MAX_PAGE)] = 100,
    cursor: Annotated[str | None, Query(max_length=_MAX_CURSOR)] = None,
) -> Response:
    """Checkpoints of one run or all, by run and falling step, page by page."""
    run = check_run(run) if run is not None else None
    after = read_cursor(cursor, run) if cursor is not None else None
    found = await given.threads.index(given.services.catalogue.page, run, after, limit + 1)
    items = [wire.CheckpointBody.of(checkpoint) for checkpoint in found[:limit]]
    more = len(found) > limit
    return json_response(wire.Page(items, write_cursor(_position(found[limit - 1])) if more else None))


@router.get(wire.RUNS)
async def runs(given: Given) -> Response:
    """All runs, with their sizes and newest checkpoints."""
    found = await given.threads.index(given.services.catalogue.runs)
    items = [
        wire.RunBody(
            run=summary.run,
            num_checkpoints=summary.num_checkpoints,
            stored_bytes=summary.stored_bytes,
            latest=wire.CheckpointBody.of(summary.latest) if summary.latest else None,
        )
        for summary in found
    ]
    return json_response(wire.RunsBody(items))


@router.get(wire.CHECKPOINTS + "/{id}")
async def checkpoint(given: Given, id: Id) -> Response:
    """One checkpoint."""
    found = await given.threads.index(given.services.catalogue.find, Reference.parse(id))
    return json_response(wire.CheckpointBody.of(found))


@router.api_route(wire.CHECKPOINTS + "/{id}/manifest", methods=["GET", "HEAD"])
async def manifest(request: Request, given: Given, id: Id) -> Response:
    """The stored manifest: zstd-compressed JSON."""
    stored = await given.threads.store(given.services.objects.manifest, Reference.parse(id))
    return await object_response(request, given, stored)


@router.api_route(wire.CHECKPOINTS + "/{id}/receipts/{rank}", methods=["GET", "HEAD"])
async def receipt(request: Request, given: Given, id: Id, rank: Annotated[int, Path(ge=0, le=99_999)]) -> Response:
    """The stored receipt of a rank."""
    stored = await given.threads.store(given.services.objects.receipt, Reference.parse(id), rank)
    return await object_response(request, given, stored)


@router.api_route(wire.CHECKPOINTS + "/{id}/shards/{name}", methods=["GET", "HEAD"])
async def shard(request: Request, given: Given, id: Id, name: Annotated[str, Path(max_length=32)]) -> Response:
    """A shard, or one range of its bytes."""
    stored = await given.threads.store(given.services.objects.shard, Reference.parse(id), name)
    return await object_response(request, given, stored)


def _position(checkpoint: Checkpoint) -> Position:
    return Position(checkpoint.run, checkpoint.step, checkpoint.committed_at, checkpoint.attempt.ulid)
