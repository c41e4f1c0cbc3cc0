"""Liveness, readiness and metrics, for orchestrators and monitoring."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import PlainTextResponse, Response

from ckptapi import bodies
from ckptd.http.bodies import json_response
from ckptd.http.context import Context, Ctx
from ckptd.http.openapi import documented
from ckptstore.errors import IndexUnavailable

router = APIRouter()


@router.get("/healthz", **documented(media="text/plain"))
@router.get("/livez", **documented(media="text/plain"))
async def live() -> Response:
    """The process responds; a restart would not help."""
    return PlainTextResponse("ok\n")


@router.get("/readyz", **documented(bodies.ReadinessBody, also={503: "Not ready; the body has the reason"}))
async def ready(ctx: Ctx) -> Response:
    """200 if the database responds, and the index matched a recent listing of the store; otherwise 503."""
    database = await ctx.with_index(_database_problem, ctx)
    store = ctx.freshness.problem()
    ready = not (database or store or ctx.leaving)
    body = bodies.ReadinessBody(ready=ready, database=database or "ok", store=store or "ok", leaving=ctx.leaving)
    return json_response(body, 200 if body.ready else 503, {"Cache-Control": "no-store"})


@router.get("/metrics", **documented(media="text/plain"))
async def metrics(ctx: Ctx) -> Response:
    """Metrics in the Prometheus text format."""
    text = await ctx.with_index(generate_latest, ctx.metrics.registry)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


def _database_problem(ctx: Context) -> str:
    try:
        ctx.catalog.follow()
    except IndexUnavailable as error:
        return str(error)
    return ""
