"""For orchestrators and monitoring: alive, ready, metrics. No token is asked for."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import PlainTextResponse, Response

from ckptapi import bodies
from ckptd.http.bodies import json_response
from ckptd.http.context import Context, Given
from ckptd.http.openapi import documented
from ckptstore.errors import IndexUnavailable

router = APIRouter()


@router.get("/livez", **documented(media="text/plain"))
async def live() -> Response:
    """The process answers: restarting it would help nobody."""
    return PlainTextResponse("ok\n")


@router.get("/readyz", **documented(bodies.ReadinessBody, also={503: "Not ready; the body says why"}))
async def ready(given: Given) -> Response:
    """200 if the database answers, the store was just listed and the index equals it; else 503."""
    database = await given.threads.index(_database_problem, given)
    store = given.services.freshness.problem()
    ready = not (database or store or given.leaving)
    body = bodies.ReadinessBody(ready=ready, database=database or "ok", store=store or "ok", leaving=given.leaving)
    return json_response(body, 200 if body.ready else 503, {"Cache-Control": "no-store"})


@router.get("/metrics", **documented(media="text/plain"))
async def metrics(given: Given) -> Response:
    """Prometheus text."""
    text = await given.threads.index(generate_latest, given.metrics.registry)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


def _database_problem(given: Context) -> str:
    try:
        given.services.catalogue.ping()
    except IndexUnavailable as error:
        return str(error)
    return ""
