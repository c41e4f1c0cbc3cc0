"""scrub: verifies checkpoints at rest, the longest unverified first."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import typer

from ckptapi.bodies import VerifyJob
from ckptctl.commands.arguments import RunOption
from ckptctl.commands.jobs import follow, job_blocks
from ckptctl.commands.verify import VerificationBody, verification_blocks
from ckptctl.completion import checkpoint_names
from ckptctl.render import Screen
from ckptctl.session import Session
from ckptstore import human
from ckptstore.clock import Clock
from ckptstore.commits.audit import operator
from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import CorruptObject, InvalidRequest
from ckptstore.names import Reference
from ckptstore.reading.verify import Verification
from ckptstore.retention.scrubbing import RateLimiter, due_for_scrub, scrub
from ckptstore.run import Run
from ckptstore.stores import Store


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("scrub")(scrub_checkpoints)


def scrub_checkpoints(
    ctx: typer.Context,
    checkpoint: Annotated[
        str | None,
        typer.Argument(
            metavar="[ID]",
            help="Only this checkpoint, even if it is known to be corrupt.",
            show_default=False,
            autocompletion=checkpoint_names,
        ),
    ] = None,
    run: RunOption = None,
    older: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Only checkpoints not verified for this time: 12h, 30d.", show_default=False),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Stop after N checkpoints.", show_default=False)
    ] = None,
    rate: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Maximum bytes per second: 50MB, 1GiB.", show_default=False)
    ] = None,
) -> None:
    """Read checkpoints completely, verify them, and record the results.

    Starts with checkpoints that were never verified, then the oldest results. It can be interrupted at any time and
    continues from there. A damaged checkpoint is listed as corrupt from then on, and restores skip it. The last
    checkpoint that was verified without errors is never deleted by a policy.
    A daemon scrubs in a job: one checkpoint, a run or all checkpoints, at full speed.
    """
    session: Session = ctx.obj
    wanted = _Wanted(checkpoint, run, older, limit, rate)
    session.dispatch(lambda: _scrub_by_job(session, wanted), lambda: _scrub_here(session, wanted))


@dataclass(frozen=True, slots=True)
class _Wanted:
    checkpoint: str | None
    run: str | None
    older: str | None
    limit: int | None
    rate: str | None


def _scrub_here(session: Session, wanted: _Wanted) -> None:
    store = session.store("scrub")
    before = session.clock() - human.parse_duration(wanted.older) if wanted.older else float("inf")
    if wanted.checkpoint is not None:
        due = [session.source.find(Reference.parse(wanted.checkpoint))]
    else:
        runs = [Run(store, name, session.clock) for name in session.run_names(wanted.run)]
        due = due_for_scrub(runs, before)[: wanted.limit]
    throttle = RateLimiter(human.parse_size(wanted.rate) if wanted.rate else 0, session.clock, time.sleep)
    results = list(_scrub(store, due, session.clock, session.screen, throttle))
    damaged = [result for result in results if not result.ok]
    if not results:
        session.screen.note("no checkpoint is due")
    bodies = [VerificationBody.of(result) for result in results]
    session.screen.emit(bodies, [r.checkpoint.id for r in damaged], verification_blocks(results))
    _raise_if_damaged(len(damaged), len(results))


def _scrub_by_job(session: Session, wanted: _Wanted) -> None:
    if (wanted.older, wanted.limit, wanted.rate) != (None, None, None):
        raise InvalidRequest("--older, --limit and --rate work on stores only", "For a daemon, use ckptd --scrub-days")
    request = VerifyJob(checkpoint=wanted.checkpoint, run=None if wanted.checkpoint else wanted.run)
    job = follow(session, session.daemon("scrub"), request)
    result = job.result or {}
    session.screen.emit(job, result.get("corrupt", []), job_blocks(job, session.clock()))
    _raise_if_damaged(result.get("num_corrupt", 0), result.get("checked", 0))


def _raise_if_damaged(num_damaged: int, num_checked: int) -> None:
    if num_damaged:
        raise CorruptObject(
            f"{num_damaged} of {human.count(num_checked, 'checkpoint')} damaged",
            "They are now listed as corrupt. Restore the bytes from a copy and scrub again, or use ckptctl rm",
        )


def _scrub(
    store: Store, due: list[Checkpoint], clock: Clock, screen: Screen, throttle: RateLimiter
) -> Iterator[Verification]:
    with screen.progress("scrubbing", sum(checkpoint.needed_bytes for checkpoint in due)) as progress:
        yield from scrub(store, due, operator(), clock, progress, throttle)
