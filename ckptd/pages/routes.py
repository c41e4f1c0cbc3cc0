"""The pages about several runs. Each queries the services, builds a view and renders a template. All are read-only."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ckptapi.bodies import AttemptBody, RestoreState, Scope
from ckptd.http.context import Context, Ctx
from ckptd.pages.forms import read_form
from ckptd.pages.overview import RunRow, chosen_runs, run_row
from ckptd.pages.queries import RunOrder, number, search
from ckptd.pages.rendering import page
from ckptd.pages.restores import session_view
from ckptd.pages.visiting import RESTORES, Visiting, Visitor, frame, newest, soon
from ckptd.services.callers import Caller
from ckptstore.stores.checks import StoreReport

_RUNS_A_PAGE = 50
_RECENT = 40
_JOBS = 100
_LIVE_S = 2

router = APIRouter(include_in_schema=False)


@router.get("/")
async def overview(request: Request, ctx: Ctx, visitor: Visiting) -> Response:
    """All runs that the visitor may see."""
    seen = [s for s in await ctx.threads.index(ctx.services.catalog.runs) if visitor.caller.sees(s.run)]
    wanted, order = search(request)
    accounts = ctx.services.accounts.known()
    summaries = chosen_runs(seen, wanted, order, accounts)
    at = number(request, "page", 1) or 1
    num_pages = -(-len(summaries) // _RUNS_A_PAGE) or 1
    at = min(max(1, at), num_pages)
    shown = summaries[(at - 1) * _RUNS_A_PAGE : at * _RUNS_A_PAGE]
    restoring = await _restoring(ctx, visitor.caller)
    uploads = await _uploads(ctx) if len(summaries) <= _RUNS_A_PAGE else None

    def look() -> list[RunRow]:
        return [
            run_row(
                summary,
                newest(ctx, summary.run, _RECENT),
                uploads.count(summary.run) if uploads is not None else None,
                restoring.count(summary.run),
                accounts.get(summary.run),
                visitor.now,
            )
            for summary in shown
        ]

    return page(
        "overview.html",
        **frame(request, visitor, live_s=5),
        rows=await ctx.threads.index(look),
        page=at,
        num_pages=num_pages,
        wanted=wanted,
        order=order,
        orders=tuple(RunOrder),
        num_runs=len(seen),
        num_checkpoints=sum(s.num_checkpoints for s in seen),
        stored_bytes=sum(s.stored_bytes for s in seen),
        num_restores=len(restoring),
        **_health(ctx),
    )


@router.get("/attempts")
async def attempts(request: Request, ctx: Ctx, visitor: Visiting) -> Response:
    """Live uploads."""
    name = request.query_params.get("run")
    found: list[AttemptBody] = await ctx.threads.store(ctx.services.uploads.live, name)
    seen = [attempt for attempt in found if visitor.caller.sees(attempt.run)]
    return page("attempts.html", **frame(request, visitor, live_s=_LIVE_S), attempts=seen, run=name)


@router.get("/restores")
async def restores(request: Request, ctx: Ctx, visitor: Visiting) -> Response:
    """Restore sessions."""
    name = request.query_params.get("run")
    found = await ctx.threads.index(ctx.services.restores.newest, name, RESTORES)
    views = [view for view in found if visitor.caller.sees(view.restore.run)]
    return page("restores.html", **frame(request, visitor, live_s=_LIVE_S), views=views, run=name)


@router.get("/restores/{id}")
async def restore(request: Request, ctx: Ctx, visitor: Visiting, id: str) -> Response:
    """One restore session and its ranks."""
    view = await ctx.threads.index(ctx.services.restores.view, id, True)
    live_s = 1 if view.restore.live else 0
    return page("restore.html", **frame(request, visitor, live_s), view=session_view(view, visitor.now))


@router.get("/jobs")
async def jobs(request: Request, ctx: Ctx, visitor: Visiting) -> Response:
    """Jobs."""
    found = await ctx.threads.index(ctx.services.jobs.newest, _JOBS)
    return page("jobs.html", **frame(request, visitor, live_s=_LIVE_S), jobs=found)


@router.get("/jobs/{id}")
async def job(request: Request, ctx: Ctx, visitor: Visiting, id: str) -> Response:
    """One job and its log."""
    found = await ctx.threads.index(ctx.services.jobs.find, id)
    live_s = 1 if found.state.live else 0
    return page("job.html", **frame(request, visitor, live_s), job=found)


@router.get("/store")
async def store(request: Request, ctx: Ctx, visitor: Visiting) -> Response:
    """The state of the store."""
    return _store_page(request, ctx, visitor, None)


@router.post("/store")
async def probe(request: Request, ctx: Ctx, visitor: Visiting) -> Response:
    """Check the store with a few small objects, which are deleted before the page is returned."""
    await read_form(request)
    async with ctx.locks.of("probe"):
        return _store_page(request, ctx, visitor, await ctx.threads.store(ctx.services.probe))


def _store_page(request: Request, ctx: Context, visitor: Visitor, probe: StoreReport | None) -> Response:
    return page(
        "store.html",
        **frame(request, visitor),
        url=ctx.services.catalog.store_url,
        probe=probe,
        may_probe=Scope.ADMIN in visitor.caller.scopes,
        **_health(ctx),
    )


def _health(ctx: Context) -> dict[str, Any]:
    freshness = ctx.services.freshness
    return {"trouble": freshness.problem(), "lag_s": freshness.lag_s()}


async def _uploads(ctx: Context) -> list[str] | None:
    """The run of each live upload."""
    found: list[AttemptBody] | None = await soon(ctx, ctx.services.uploads.live, None)
    return [attempt.run for attempt in found] if found is not None else None


async def _restoring(ctx: Context, caller: Caller) -> list[str]:
    """The run of each restore in progress."""
    found = await ctx.threads.index(ctx.services.restores.newest, None, RESTORES)
    live = (view.restore for view in found if view.restore.state is RestoreState.RESTORING)
    return [restore.run for restore in live if caller.sees(restore.run)]
