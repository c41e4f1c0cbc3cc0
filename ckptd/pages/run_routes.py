"""The pages of one run: its checkpoints, its tensors, and its time."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response

from ckptd.http.context import Context, Ctx
from ckptd.pages.overview import Progress, progress
from ckptd.pages.queries import page_query
from ckptd.pages.rendering import page
from ckptd.pages.runs import run_view
from ckptd.pages.state import run_state_view
from ckptd.pages.timeline import goodput_view
from ckptd.pages.visiting import MOST_CHECKPOINTS, Visiting, Visitor, frame, newest, soon
from ckptd.services.retention import RetentionView
from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.errors import NoCheckpoint
from ckptstore.names import check_run

router = APIRouter(include_in_schema=False)


@router.get("/runs/{run}")
async def run(request: Request, ctx: Ctx, visitor: Visiting, run: str) -> Response:
    """One run with its checkpoints."""
    query = page_query(request)
    checkpoints = await ctx.threads.index(newest, ctx, run, MOST_CHECKPOINTS)
    if not checkpoints:
        raise _nothing_here(run)
    kept: RetentionView | None
    kept, going = await asyncio.gather(
        soon(ctx, ctx.services.retention_views.of_run, run),
        _progress(ctx, run, checkpoints, visitor),
    )
    policy = kept.policy if kept else None
    previewed = policy if query.plan else query.policy
    view = run_view(
        run,
        checkpoints,
        kept.reasons(checkpoints) if kept else None,
        kept.evaluate(checkpoints, previewed) if kept and previewed else None,
        query,
        visitor.now,
        await _overlaid(ctx, visitor, query.other),
    )
    states = ", ".join(f"{count:,} {state}" for state, count in view.states)
    return page(
        "run.html",
        **frame(request, visitor),
        view=view,
        states=states,
        all_states=tuple(State),
        most=MOST_CHECKPOINTS,
        policy=policy,
        progress=going,
        account=ctx.services.accounts.known().get(run),
        tags=sorted(checkpoints[0].tags.items()),
        blocked=kept.blocked(run, checkpoints) if kept else "",
        not_finite_steps=sum(bool(c.not_finite) for c in checkpoints),
        known=kept is not None,
    )


@router.get("/runs/{run}/goodput")
async def goodput(request: Request, ctx: Ctx, visitor: Visiting, run: str) -> Response:
    """What became of the time of one run."""
    account = await ctx.threads.store(ctx.services.accounts.of_run, run)
    checkpoints = await ctx.threads.index(newest, ctx, run, MOST_CHECKPOINTS)
    return page("goodput.html", **frame(request, visitor), view=goodput_view(account, checkpoints))


@router.get("/runs/{run}/state")
async def run_state(request: Request, ctx: Ctx, visitor: Visiting, run: str) -> Response:
    """How the tensors of a run developed, and where they went wrong."""
    checkpoints = await ctx.threads.index(newest, ctx, run, MOST_CHECKPOINTS)
    if not checkpoints:
        raise _nothing_here(run)
    found = await ctx.threads.store(ctx.services.state_history.of_run, run, checkpoints)
    view = run_state_view(run, found, request.query_params.get("tensor", "")[:4096])
    return page("run_state.html", **frame(request, visitor), view=view)


def _nothing_here(run: str) -> NoCheckpoint:
    return NoCheckpoint(f"run {run[:200]!r} has no checkpoint", "Its first save may be in progress: see the uploads")


async def _overlaid(ctx: Context, visitor: Visitor, other: str) -> list[Checkpoint]:
    """The checkpoints of the run that is drawn beside another one."""
    if not other:
        return []
    if not visitor.caller.sees(check_run(other)):
        raise NoCheckpoint(f"run {other!r} has no checkpoint", "Choose a run that the token may see")
    return await ctx.threads.index(newest, ctx, other, MOST_CHECKPOINTS)


async def _progress(ctx: Context, run: str, checkpoints: list[Checkpoint], visitor: Visitor) -> Progress:
    """How the run goes; without what only the store knows, if it is slow."""
    accounts = ctx.services.accounts
    account, uploads = accounts.known().get(run), soon(ctx, ctx.services.uploads.live, run)
    if account is None:
        account, live = await asyncio.gather(soon(ctx, accounts.of_run, run), uploads)
    else:
        live = await uploads
    return progress(checkpoints, len(live) if live is not None else None, account, visitor.now)
