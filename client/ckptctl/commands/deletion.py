"""prune, gc: what goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
import typer

from ckptctl import human
from ckptctl.commands.arguments import RunOption
from ckptctl.commands.listing import STATE_STYLES, short_id
from ckptctl.exits import PartlyDone
from ckptctl.pruning import open_pruning
from ckptctl.render import Block, Column, Row, Table
from ckptctl.session import Session
from ckptstore.catalog import Checkpoint, State
from ckptstore.deletion import Collected, collect
from ckptstore.errors import CheckpointHeld, NoCheckpoint
from ckptstore.names import checkpoint_id
from ckptstore.retention import Policy
from ckptstore.wire import PruneBody, PruneItem


class CollectedBody(msgspec.Struct, frozen=True, kw_only=True):
    """What a collection did to one run, as JSON."""

    run: str
    rolled_forward: list[str]
    aborted: list[str]
    freed_bytes: int


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("prune")(prune)
    app.command("gc")(collect_garbage)


def prune(
    ctx: typer.Context,
    keep: Annotated[int, typer.Option("--keep", metavar="N", help="Keep the newest N steps of each run.")],
    run: RunOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would go and what would stay.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete old checkpoints for good.

    Every run is pruned by itself. Checkpoints that are being read stay.
    """
    session: Session = ctx.obj
    pruning = open_pruning(session, Policy(keep), run)
    plan = pruning.plan()
    remove = [item for item in plan.items if not item.reasons]
    if dry_run or not remove:
        body = plan if dry_run else msgspec.structs.replace(plan, dry_run=False)
        session.screen.emit(body, [item.checkpoint.id for item in remove], _plan_blocks(plan, session.clock()))
        return
    if not yes:
        session.screen.preview([*_plan_blocks(plan, session.clock()), ""])
        session.screen.confirm(f"Delete {_amount(remove)} for good?")
    with session.screen.progress("deleting", sum(item.checkpoint.stored_bytes for item in remove)) as progress:
        done = pruning.apply(progress)
    gone = [item for item in done.items if not item.reasons and item.checkpoint.id not in done.held]
    session.screen.emit(done, [item.checkpoint.id for item in gone], _done_blocks(done, gone, shown=not yes))
    _raise_if_held(done, gone)


def collect_garbage(
    ctx: typer.Context,
    run: RunOption = None,
    grace: Annotated[
        str,
        typer.Option(metavar="TIME", help="Leave unfinished saves alone that wrote something since: 90s, 30m, 24h."),
    ] = "24h",
) -> None:
    """Finish what crashes left behind.

    Commits saves that were complete, deletes incomplete ones older than the grace, and completes deletions.
    """
    session: Session = ctx.obj
    grace_s = human.parse_duration(grace)
    store = session.store("gc")
    runs = session.source.runs()
    if run is not None:
        if run not in runs:
            raise NoCheckpoint(f"run {run!r} has nothing in {store.url}", "ckptctl runs shows what there is")
        runs = [run]
    results = [_collected(name, collect(store, name, session.clock, grace_s)) for name in runs]
    touched = [name for result in results for name in (*result.rolled_forward, *result.aborted)]
    session.screen.emit(results, touched, _collected_blocks(results))


def _plan_blocks(plan: PruneBody, now: float) -> Iterator[Block]:
    keep = [item for item in plan.items if item.reasons]
    remove = [item for item in plan.items if not item.reasons]
    if keep:
        yield f"Keep {_amount(keep)}"
        yield _item_table(keep, now)
        yield ""
    if remove:
        yield f"Remove {_amount(remove)}"
        yield _item_table(remove, now)
    else:
        yield "Nothing to remove"


def _done_blocks(done: PruneBody, gone: Sequence[PruneItem], shown: bool) -> Iterator[Block]:
    if not shown:
        for item in gone:
            yield f"removed {item.checkpoint.id}"
    yield f"Removed {human.count(len(gone), 'checkpoint')}, freed {human.size(done.freed_bytes)}"


def _item_table(items: Sequence[PruneItem], now: float) -> Table:
    columns = [
        Column("  CHECKPOINT"),
        Column("STATE", drop=1),
        Column("AGE", right=True),
        Column("STORED", right=True),
        Column("REASONS"),
    ]
    rows = []
    for item in items:
        c = item.checkpoint.checkpoint()
        cells = (f"  {short_id(c)}", c.state, human.age(now - c.committed_at), human.size(c.stored_bytes))
        rows.append(Row((*cells, ", ".join(item.reasons) or _why_removed(c)), STATE_STYLES[c.state]))
    return Table(tuple(columns), rows)


def _why_removed(checkpoint: Checkpoint) -> str:
    return "superseded" if checkpoint.state is State.SUPERSEDED else "older"


def _amount(items: Sequence[PruneItem]) -> str:
    stored = sum(item.checkpoint.stored_bytes for item in items)
    runs = len({item.checkpoint.run for item in items})
    of_runs = f" of {runs} runs" if runs > 1 else ""
    return f"{human.count(len(items), 'checkpoint')}{of_runs}, {human.size(stored)}"


def _raise_if_held(done: PruneBody, gone: Sequence[PruneItem]) -> None:
    if not done.held:
        return
    message = f"{human.count(len(done.held), 'checkpoint')} spared, being read: {', '.join(done.held)}"
    if gone:
        raise PartlyDone(message, "Prune again later")
    raise CheckpointHeld(message, "Prune again later")


def _collected(run: str, result: Collected) -> CollectedBody:
    return CollectedBody(
        run=run,
        rolled_forward=[checkpoint_id(run, attempt) for attempt in result.rolled_forward],
        aborted=[checkpoint_id(run, attempt) for attempt in result.aborted],
        freed_bytes=result.freed_bytes,
    )


def _collected_blocks(results: Sequence[CollectedBody]) -> Iterator[Block]:
    columns = (
        Column("RUN"),
        Column("ROLLED FORWARD", right=True),
        Column("ABORTED", right=True),
        Column("FREED", right=True),
    )
    rows = [Row((r.run, str(len(r.rolled_forward)), str(len(r.aborted)), human.size(r.freed_bytes))) for r in results]
    if rows:
        yield Table(columns, rows)
    for result in results:
        yield from (f"rolled forward {name}" for name in result.rolled_forward)
        yield from (f"aborted {name}" for name in result.aborted)
