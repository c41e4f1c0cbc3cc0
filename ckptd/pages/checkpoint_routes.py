"""The pages of one checkpoint: its contents, and its tensors."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from ckptd.http.context import Context, Ctx
from ckptd.pages.contents import ContentsView, contents_view
from ckptd.pages.rendering import page
from ckptd.pages.state import checkpoint_state_view, difference_view
from ckptd.pages.visiting import MOST_CHECKPOINTS, RESTORES, Visiting, frame, newest, soon
from ckptd.services.retention import RetentionView
from ckptstore import human
from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import CkptError, NoCheckpoint
from ckptstore.names import Reference
from ckptstore.reading.statistics import CheckpointStatistics

_MAX_ENTRIES = 100_000

router = APIRouter(include_in_schema=False)


@router.get("/checkpoints/{id}")
async def checkpoint(request: Request, ctx: Ctx, visitor: Visiting, id: str) -> Response:
    """One checkpoint and its contents."""
    found = await ctx.threads.index(ctx.services.catalog.find, Reference.parse(id))
    kept: RetentionView | None = await soon(ctx, ctx.services.retention_views.of_run, found.run)
    contents, unread = await _contents(ctx, found)
    restores = await ctx.threads.index(ctx.services.restores.newest, found.run, RESTORES)
    older, newer = await ctx.threads.index(_neighbours, ctx, found)
    verified_at = kept.verified.get(found.attempt) if kept else None
    return page(
        "checkpoint.html",
        **frame(request, visitor),
        checkpoint=found,
        branch=found.branch_state.removeprefix(str(found.attempt.generation)).lstrip(",; "),
        older=older,
        newer=newer,
        base=str(request.base_url).rstrip("/"),
        age_s=max(0.0, visitor.now - found.committed_at),
        share=human.ratio(found.stored_bytes, found.raw_bytes),
        verified=f"{human.age(visitor.now - verified_at)} ago" if verified_at else "never" if kept else "not known",
        held=kept.holds.get(found.attempt, ()) if kept else (),
        contents=contents,
        unread=unread,
        restores=[view.restore for view in restores if view.restore.checkpoint.id == found.id],
        events=await ctx.threads.index(ctx.services.events.of_checkpoint, found.id),
    )


@router.get("/checkpoints/{id}/state")
async def checkpoint_state(request: Request, ctx: Ctx, visitor: Visiting, id: str) -> Response:
    """The statistics of the tensors of a checkpoint, and what changed since the one before it, or another one."""
    found = await ctx.threads.index(ctx.services.catalog.find, Reference.parse(id))
    against = request.query_params.get("against", "")[:400]
    if against:
        base = Reference.parse(against)
        if not visitor.caller.sees(base.run):
            raise NoCheckpoint(
                f"run {base.run!r} has no checkpoint", "Compare with a checkpoint that the token may see"
            )
        before: Checkpoint | None = await ctx.threads.index(ctx.services.catalog.find, base)
    else:
        listed = await ctx.threads.index(newest, ctx, found.run, MOST_CHECKPOINTS)
        before = max((c for c in listed if c.attempt < found.attempt), key=lambda c: c.attempt, default=None)
    view, unread = await _state(ctx, found)
    old = (await _state(ctx, before))[0] if before is not None else None
    difference = None
    if before is not None:
        try:
            changed = await ctx.threads.store(ctx.services.state_history.unequal, before, found)
            difference = difference_view(old, view, before.id, changed)
        except CkptError as error:
            unread = unread or error.message
    return page(
        "checkpoint_state.html",
        **frame(request, visitor),
        checkpoint=found,
        view=checkpoint_state_view(view) if view is not None else None,
        unread=unread,
        difference=difference,
    )


async def _state(ctx: Context, found: Checkpoint) -> tuple[CheckpointStatistics | None, str]:
    """The statistics of a checkpoint, or the reason why they are not shown."""
    try:
        return await ctx.threads.store(ctx.services.state_history.of_checkpoint, found), ""
    except CkptError as error:
        return None, error.message


async def _contents(ctx: Context, found: Checkpoint) -> tuple[ContentsView | None, str]:
    """The contents of a checkpoint, or the reason why they are not shown."""
    if found.num_entries > _MAX_ENTRIES:
        return None, f"{found.num_entries:,} entries are too many to draw: ckptctl show {found.id}"
    exact = Reference(found.run, found.step, found.attempt.ulid)

    def look() -> ContentsView:
        contents = ctx.services.contents
        entries = contents.entries(exact, 0, _MAX_ENTRIES).items
        return contents_view(found.world_size, contents.shards(exact).items, entries)

    try:
        return await ctx.threads.store(look), ""
    except CkptError as error:
        return None, f"The contents cannot be shown: {error.message}"


def _neighbours(ctx: Context, found: Checkpoint) -> tuple[Checkpoint | None, Checkpoint | None]:
    """The checkpoints before and after one in its run."""
    listed = newest(ctx, found.run, MOST_CHECKPOINTS)
    older = max((c for c in listed if c.attempt < found.attempt), key=lambda c: c.attempt, default=None)
    newer = min((c for c in listed if c.attempt > found.attempt), key=lambda c: c.attempt, default=None)
    return older, newer
