"""prune: what policies do not keep goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
import typer

from ckptapi.bodies import PruneBody, PruneItem
from ckptctl.commands.listing import STATE_STYLES, short_id
from ckptctl.commands.rules import (
    KeepBestOption,
    KeepDailyOption,
    KeepEveryOption,
    KeepHourlyOption,
    KeepOption,
    KeepWeeklyOption,
    KeepWithinOption,
    MaxBytesOption,
    policy_from,
)
from ckptctl.exits import PartlyDone
from ckptctl.pruning import open_pruning
from ckptctl.render import Block, Row, Table, TableColumn
from ckptctl.session import Session
from ckptstore import human
from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.errors import CheckpointHeld
from ckptstore.retention.pruning import Prune


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("prune")(prune)


def prune(
    ctx: typer.Context,
    keep: KeepOption = None,
    keep_every: KeepEveryOption = 0,
    keep_hourly: KeepHourlyOption = 0,
    keep_daily: KeepDailyOption = 0,
    keep_weekly: KeepWeeklyOption = 0,
    keep_best: KeepBestOption = None,
    keep_within: KeepWithinOption = None,
    max_bytes: MaxBytesOption = None,
    run: Annotated[
        str | None, typer.Option("--run", "-r", metavar="GLOB", help="These runs only.", show_default=False)
    ] = None,
    grace: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="It can be taken back for so long; 0s: gone at once.  [default: 24h]"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would go and what would stay.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    force: Annotated[bool, typer.Option("--force", help="With --yes: even if nearly all of a run goes.")] = False,
) -> None:
    """Delete old checkpoints.

    Every run is pruned by itself; what any of the rules keeps stays. So do the newest checkpoint, the last that was
    verified, and what is pinned or being read. Without a rule, the policies in force count (ckptctl policy).
    What goes is listed no more at once, and deleted after the grace; until then ckptctl undelete takes it back.
    """
    session: Session = ctx.obj
    policy = policy_from(keep, keep_every, keep_hourly, keep_daily, keep_weekly, keep_best, keep_within, max_bytes)
    wanted = Prune(policy, run, human.parse_duration(grace) if grace is not None else None)
    _prune(session, wanted, dry_run, yes, force)


def _prune(session: Session, wanted: Prune, dry_run: bool, yes: bool, force: bool) -> None:
    pruning = open_pruning(session, wanted)
    plan = pruning.plan()
    remove = [item for item in plan.items if not item.reasons]
    if dry_run or not remove:
        body = plan if dry_run else msgspec.structs.replace(plan, dry_run=False)
        session.screen.emit(body, [item.checkpoint.id for item in remove], _plan_blocks(plan, session.clock()))
        return
    if not yes:
        session.screen.preview([*_plan_blocks(plan, session.clock()), ""])
        session.screen.confirm(f"Delete {_amount(remove)}{_for_good(plan.grace_s)}?")
    with session.screen.progress("deleting", sum(item.checkpoint.stored_bytes for item in remove)) as progress:
        # Whoever says yes to a plan on the screen has looked at it.
        done = pruning.apply(progress, looked_at=force or not yes)
    gone = [item for item in done.items if not item.reasons and item.checkpoint.id not in done.held]
    session.screen.emit(done, [item.checkpoint.id for item in gone], _done_blocks(done, gone, shown=not yes))
    _raise_if_held(done, gone)


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
    count, size = human.count(len(gone), "checkpoint"), human.size(done.freed_bytes)
    if done.grace_s:
        until = human.duration(done.grace_s)
        yield f"Hid {count}; {size} are freed in {until}, ckptctl undelete takes that back until then"
    else:
        yield f"Removed {count}, freed {size}"


def _item_table(items: Sequence[PruneItem], now: float) -> Table:
    columns = [
        TableColumn("  CHECKPOINT"),
        TableColumn("STATE", drop=1),
        TableColumn("AGE", right=True),
        TableColumn("STORED", right=True),
        TableColumn("REASONS"),
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


def _for_good(grace_s: float) -> str:
    return f", for good after {human.duration(grace_s)}" if grace_s else " for good"


def _raise_if_held(done: PruneBody, gone: Sequence[PruneItem]) -> None:
    if not done.held:
        return
    message = f"{human.count(len(done.held), 'checkpoint')} spared, held: {', '.join(done.held)}"
    if gone:
        raise PartlyDone(message, "Prune again later")
    raise CheckpointHeld(message, "Prune again later")
