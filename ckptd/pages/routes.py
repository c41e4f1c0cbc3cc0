"""The pages. Each queries the services, builds a view and renders a template; forms change what the API can change."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Annotated, Any, NamedTuple, TypeVar
from urllib.parse import quote

from fastapi import APIRouter, Depends, Request
from starlette.responses import RedirectResponse, Response

from ckptapi.bodies import Scope
from ckptapi.listing import check_glob
from ckptd.http.access import caller_of
from ckptd.http.context import Context, Ctx
from ckptd.pages.contents import ContentsView, contents_view
from ckptd.pages.curves import stored_curves, values_of
from ckptd.pages.queries import MOST_LINES, RunOrder, RunsQuery, page_query, paged, query_of
from ckptd.pages.rendering import page
from ckptd.pages.restores import session_view
from ckptd.pages.runs import (
    Progress,
    RetentionView,
    RunRow,
    chosen_runs,
    fingerprint,
    progress,
    retention_view,
    run_row,
    run_view,
)
from ckptd.pages.sessions import VISIT, read_form
from ckptd.pages.timeline import timeline
from ckptd.services.tokens import Caller
from ckptstore import human
from ckptstore.analysis.difference import saved_values
from ckptstore.commits.catalog import Checkpoint, State, ranked
from ckptstore.commits.labels import LabelChange
from ckptstore.errors import CkptError, Conflict, Damaged, InvalidRequest, NoCheckpoint, Unavailable
from ckptstore.format.records import Best
from ckptstore.names import Reference, check_run, is_run
from ckptstore.retention.deletion import SWEEP_GRACE_S
from ckptstore.retention.pruning import Prune, PrunePlan
from ckptstore.stores.checks import StoreReport

_RECENT = 40
_JOBS = 100
_LARGEST = 30
_MOST_OTHERS = 19
_LIVE_S = 2

router = APIRouter(include_in_schema=False)
MOST_CHECKPOINTS = 5_000
"""Maximum number of checkpoints on the page of a run."""
RESTORES = 100
"""Maximum number of restore sessions on a page."""
_PATIENCE_S = 3.0
_T = TypeVar("_T")


class Visitor(NamedTuple):
    """The user who views a page."""

    caller: Caller
    csrf: str
    """The CSRF token for the forms."""
    logged_in: bool
    """Logged in by the form instead of by a header."""
    now: float
    here: str
    """The path of the page."""

    def page(self, template: str, /, **values: Any) -> Response:
        """A page with its frame. live_s: refresh interval in seconds; without it, the page is not refreshed."""
        return page(template, visitor=self, now=self.now, here=self.here, **values)


async def _visitor(request: Request) -> Visitor:
    csrf, logged_in, now = request.scope[VISIT]
    return Visitor(caller_of(request), csrf, logged_in, now, request.url.path)


Visiting = Annotated[Visitor, Depends(_visitor)]


async def soon(ctx: Context, work: Callable[..., _T], *args: Any) -> _T | None:
    """The result of a call to the store; None if the store is slow, so that the rest of the page is shown."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            return await ctx.with_store(work, *args)
    except (TimeoutError, Unavailable, Damaged):
        return None


@router.get("/")
async def overview(request: Request, ctx: Ctx, visitor: Visiting) -> Response:
    """All runs that the visitor may see."""
    seen = [s for s in await ctx.with_index(ctx.catalog.runs) if visitor.caller.sees(s.run)]
    query = query_of(request, RunsQuery)
    accounts = ctx.accounts.known()
    summaries = chosen_runs(seen, query.q.strip(), query.sort, accounts)
    shown, at, num_pages = paged(summaries, query.page)
    sessions = await ctx.with_index(ctx.restores.newest, None, RESTORES)
    restoring = [view.run for view in sessions if view.state.live and visitor.caller.sees(view.run)]
    found = await soon(ctx, ctx.uploads, None) if num_pages == 1 else None
    uploads = [attempt.run for attempt in found] if found is not None else None

    def look() -> list[RunRow]:
        return [
            run_row(
                summary,
                ctx.catalog.newest(summary.run, _RECENT) if is_run(summary.run) else (),
                uploads.count(summary.run) if uploads is not None else None,
                restoring.count(summary.run),
                accounts.get(summary.run),
                visitor.now,
            )
            for summary in shown
        ]

    return visitor.page(
        "overview.html",
        live_s=5,
        rows=await ctx.with_index(look),
        page=at,
        num_pages=num_pages,
        wanted=query.q.strip(),
        order=query.sort,
        orders=tuple(RunOrder),
        seen=seen,
        num_restores=len(restoring),
        **_health(ctx),
    )


@router.get("/attempts")
async def attempts(request: Request, ctx: Ctx, visitor: Visiting) -> Response:
    """Live uploads."""
    name = request.query_params.get("run")
    found = await ctx.with_store(ctx.uploads, name)
    seen = [attempt for attempt in found if visitor.caller.sees(attempt.run)]
    return visitor.page("attempts.html", live_s=_LIVE_S, attempts=seen, run=name)


@router.get("/restores")
async def restores(request: Request, ctx: Ctx, visitor: Visiting) -> Response:
    """Restore sessions."""
    name = request.query_params.get("run")
    found = await ctx.with_index(ctx.restores.newest, name, RESTORES)
    views = [view for view in found if visitor.caller.sees(view.run)]
    return visitor.page("restores.html", live_s=_LIVE_S, views=views, run=name)


@router.get("/restores/{id}")
async def restore(ctx: Ctx, visitor: Visiting, id: str) -> Response:
    """One restore session and its ranks."""
    found = await ctx.with_index(ctx.restores.view, id, True)
    return visitor.page("restore.html", live_s=int(found.state.live), restore=found, view=session_view(found))


@router.get("/jobs")
async def jobs(ctx: Ctx, visitor: Visiting) -> Response:
    """Jobs."""
    found = await ctx.with_index(ctx.jobs.newest, _JOBS)
    return visitor.page("jobs.html", live_s=_LIVE_S, jobs=found)


@router.get("/jobs/{id}")
async def job(ctx: Ctx, visitor: Visiting, id: str) -> Response:
    """One job and its log."""
    found = await ctx.with_index(ctx.jobs.find, id)
    return visitor.page("job.html", live_s=int(found.state.live), job=found)


@router.get("/store")
async def store(ctx: Ctx, visitor: Visiting) -> Response:
    """The state of the store."""
    return await _store_page(ctx, visitor, None)


@router.post("/store")
async def probe(request: Request, ctx: Ctx, visitor: Visiting) -> Response:
    """Check the store with a few small objects, which are deleted before the page is returned."""
    await read_form(request)
    async with ctx.locks.of("probe"):
        return await _store_page(ctx, visitor, await ctx.with_store(ctx.probe))


async def _store_page(ctx: Context, visitor: Visitor, probe: StoreReport | None) -> Response:
    stored = Counter[str]()
    for summary in await ctx.with_index(ctx.catalog.runs):
        stored[summary.run.partition("/")[0]] += summary.stored_bytes
    largest = stored.most_common(_LARGEST)
    rows = await ctx.with_index(ctx.catalog.stored_over_time, visitor.now)
    groups = [name for name, _ in largest[:MOST_LINES] if largest[1:]]
    return visitor.page(
        "store.html",
        url=ctx.catalog.store_url,
        probe=probe,
        stored=largest,
        rows=rows,
        curves=stored_curves(rows, groups, visitor.now),
        waste=ctx.waste(),
        started_at=ctx.freshness.started_at,
        stored_bytes=stored.total(),
        **_health(ctx),
    )


def _health(ctx: Context) -> dict[str, Any]:
    freshness = ctx.freshness
    return {"trouble": freshness.problem(), "lag_s": freshness.lag_s()}


@router.get("/runs/{run:path}")
async def run(request: Request, ctx: Ctx, visitor: Visiting, run: str) -> Response:
    """One run with its checkpoints."""
    query = page_query(request)
    checkpoints = await ctx.with_index(ctx.catalog.newest, run, MOST_CHECKPOINTS)
    if not checkpoints:
        raise NoCheckpoint(f"run {run[:200]!r} has no checkpoint", "Its first save may be in progress: see the uploads")
    kept: RetentionView | None
    kept, going = await asyncio.gather(
        soon(ctx, retention_view, ctx.source.run(run)),
        _progress(ctx, run, checkpoints, visitor),
    )
    policy = kept.policy if kept else None
    previewed = policy if query.plan else query.policy
    others, not_drawn = await _overlaid(ctx, visitor, run, query.other)
    pruned = kept.evaluate(checkpoints, previewed) if kept and previewed else None
    preview = PrunePlan(tuple(pruned)) if pruned is not None else None
    deleted = await soon(ctx, ctx.operator("").deleted, run)
    live = [c for c in checkpoints if c.live]
    bests = map(Best.parse, policy.keep_best if policy else ())
    return visitor.page(
        "run.html",
        run=run,
        view=run_view(checkpoints, query, visitor.now, others),
        reasons=kept.reasons(checkpoints) if kept else None,
        preview=preview,
        expected=fingerprint(preview) if preview is not None else "",
        decided={d.checkpoint.attempt: "thin" if d.thins else "keep" if d.reasons else "remove" for d in pruned or ()},
        values_of=values_of,
        beside={run: checkpoints, **others},
        all_states=tuple(State),
        most=MOST_CHECKPOINTS,
        not_drawn=not_drawn,
        policy=policy,
        progress=going,
        account=ctx.accounts.known().get(run),
        blocked=kept.blocked(run, checkpoints) if kept else "",
        known=kept is not None,
        deleted=deleted or (),
        best=[(best.metric, found[0]) for best in bests if (found := ranked(best, live))],
    )


@router.post("/runs/{run:path}")
async def prune(request: Request, ctx: Ctx, visitor: Visiting, run: str) -> Response:
    """Delete what the preview of the same query showed. Raises Conflict if that has changed."""
    form = await read_form(request)
    wanted = Prune(page_query(request).policy, check_run(run), force=True)
    operator = ctx.operator(visitor.caller.name)
    plan = await ctx.with_store(operator.plan_prune, wanted)
    if form.get("expected") != fingerprint(plan):
        raise Conflict("this prune would delete other checkpoints than the page showed", "Look at the preview again")
    done = await ctx.with_store(operator.prune, wanted, plan)
    await ctx.with_index(ctx.events.pruned, done.remove)
    return RedirectResponse(f"/runs/{quote(run)}", 303)


@router.get("/goodput/{run:path}")
async def goodput(ctx: Ctx, visitor: Visiting, run: str) -> Response:
    """A breakdown of one run's wall-clock time."""
    account = await ctx.with_store(ctx.accounts.of_run, run)
    checkpoints = await ctx.with_index(ctx.catalog.newest, run, MOST_CHECKPOINTS)
    return visitor.page("goodput.html", account=account, timeline=timeline(account, checkpoints))


async def _overlaid(ctx: Context, visitor: Visitor, run: str, other: str) -> tuple[dict[str, list[Checkpoint]], int]:
    """The checkpoints of the first runs that `other` names, to be drawn beside `run`, and how many are left out."""
    patterns = list(map(check_glob, other.split()))
    runs = [summary.run for summary in await ctx.with_index(ctx.catalog.runs)] if patterns else []
    meant = [name for name in runs if name != run and any(fnmatchcase(name, pattern) for pattern in patterns)]
    seen = list(filter(visitor.caller.sees, meant))
    if patterns and not seen:
        raise NoCheckpoint(f"no other run matches {other!r}", "Choose runs that the token may see")
    drawn = {name: await ctx.with_index(ctx.catalog.newest, name, MOST_CHECKPOINTS) for name in seen[:_MOST_OTHERS]}
    return drawn, len(seen) - len(drawn)


async def _progress(ctx: Context, run: str, checkpoints: list[Checkpoint], visitor: Visitor) -> Progress:
    """How the run goes; without what only the store knows, if it is slow."""
    accounts = ctx.accounts
    account, uploads = accounts.known().get(run), soon(ctx, ctx.uploads, run)
    if account is None:
        account, live = await asyncio.gather(soon(ctx, accounts.of_run, run), uploads)
    else:
        live = await uploads
    return progress(checkpoints, len(live) if live is not None else None, account, visitor.now)


_MAX_ENTRIES = 100_000


@router.get("/checkpoints/{id:checkpoint}")
async def checkpoint(request: Request, ctx: Ctx, visitor: Visiting, id: str) -> Response:
    """One checkpoint and its contents."""
    found = await ctx.with_index(ctx.catalog.find, Reference.parse(id))
    kept: RetentionView | None = await soon(ctx, retention_view, ctx.source.run(found.run))
    contents, unread = await _contents(ctx, found)
    restores = await ctx.with_index(ctx.restores.newest, found.run, RESTORES)
    older, newer = await ctx.with_index(_neighbours, ctx, found)
    return visitor.page(
        "checkpoint.html",
        checkpoint=found,
        branch=found.branch_state.removeprefix(str(found.attempt.generation)).lstrip(",; "),
        older=older,
        newer=newer,
        base=str(request.base_url).rstrip("/"),
        share=human.ratio(found.stored_bytes, found.raw_bytes),
        known=kept is not None,
        verified_at=kept.verified.get(found.attempt) if kept else None,
        held=kept.holds.get(found.attempt, ()) if kept else (),
        contents=contents,
        unread=unread,
        restores=[view for view in restores if view.checkpoint.id == found.id],
        events=await ctx.with_index(ctx.events.of_checkpoint, found.id),
    )


@router.post("/checkpoints/{id:checkpoint}")
async def change(request: Request, ctx: Ctx, visitor: Visiting, id: str) -> Response:
    """Pin, tag, delete or undelete a checkpoint."""
    form = await read_form(request)
    action, name, reason = form.get("action", ""), form.get("name", "").strip(), form.get("reason", "")
    visitor.caller.check_scope(Scope.WRITE if "tag" in action else Scope.PRUNE)
    operator, store, reference = ctx.operator(visitor.caller.name), ctx.with_store, Reference.parse(id)
    if action == "undelete":
        found = await store(operator.undelete, reference, reason)
        return RedirectResponse(f"/checkpoints/{quote(found.id)}", 303)
    found = await ctx.with_index(ctx.catalog.find, reference)
    label, _, value = name.partition("=")
    match action:
        case "pin":
            await store(operator.pin, found, name, reason)
        case "unpin":
            await store(operator.unpin, found, name)
        case "tag":
            await store(operator.label, found, LabelChange({label: value}), reason)
        case "untag":
            await store(operator.label, found, LabelChange({name: None}), reason)
        case "delete" if "sure" in form:
            await store(operator.delete, found, SWEEP_GRACE_S, reason)
            return RedirectResponse(f"/runs/{quote(found.run)}", 303)
        case _:
            raise InvalidRequest("the form names no action, or was not confirmed", "Submit the form from its page")
    return RedirectResponse(f"/checkpoints/{quote(found.id)}", 303)


async def _contents(ctx: Context, found: Checkpoint) -> tuple[ContentsView | None, str]:
    """The contents of a checkpoint, or the reason why they are not shown."""
    if found.num_entries > _MAX_ENTRIES:
        return None, f"{found.num_entries:,} entries are too many to draw: ckptctl show {found.id}"
    exact = Reference(found.run, found.step, found.attempt.ulid)

    def look() -> ContentsView:
        contents = ctx.contents
        entries = contents.entries(exact, 0, _MAX_ENTRIES).items
        values = saved_values(ctx.source, found)
        return contents_view(found.world_size, contents.shards(exact).items, entries, values)

    try:
        return await ctx.with_store(look), ""
    except CkptError as error:
        return None, f"The contents cannot be shown: {error.message}"


def _neighbours(ctx: Context, found: Checkpoint) -> tuple[Checkpoint | None, Checkpoint | None]:
    """The checkpoints before and after one in its run."""
    listed = ctx.catalog.newest(found.run, MOST_CHECKPOINTS)
    older = max((c for c in listed if c.attempt < found.attempt), key=lambda c: c.attempt, default=None)
    newer = min((c for c in listed if c.attempt > found.attempt), key=lambda c: c.attempt, default=None)
    return older, newer
