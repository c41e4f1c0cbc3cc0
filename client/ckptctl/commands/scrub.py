"""scrub: verifies checkpoints at rest, the longest unverified first."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated

import typer

from ckptapi.bodies import HealJob, VerifyJob
from ckptctl.commands.jobs import follow, job_blocks
from ckptctl.commands.verify import VerificationBody, verification_blocks
from ckptctl.completion import checkpoint_names
from ckptctl.session import Session
from ckptstore import human
from ckptstore.commits.audit import operator
from ckptstore.errors import CorruptObject, InvalidRequest
from ckptstore.names import Reference
from ckptstore.retention.scrubbing import RateLimiter, due_for_scrub, scrub
from ckptstore.run import Run
from ckptstore.stores import open_store


def scrub_checkpoints(
    ctx: typer.Context,
    which: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN[@STEP]",
            help="All checkpoints of a run, or one checkpoint, even if it is known to be corrupt.",
            show_default=False,
            autocompletion=checkpoint_names,
        ),
    ] = None,
    older: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Only checkpoints not verified for this time: 12h, 30d.", show_default=False),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Stop after N checkpoints.", show_default=False)
    ] = None,
    heal: Annotated[
        bool, typer.Option("--heal", help="Write damaged objects again, from other holders of the same bytes.")
    ] = False,
    copy: Annotated[
        str | None,
        typer.Option("--from", metavar="STORE", help="With --heal: a copy of the store to take bytes from."),
    ] = None,
    rate: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Maximum bytes per second: 50MB, 1GiB.", show_default=False)
    ] = None,
) -> None:
    """Read checkpoints completely, verify them, and record the results.

    Starts with checkpoints that were never verified, then the oldest results. It can be interrupted at any time and
    continues from there. A damaged checkpoint is listed as corrupt from then on, and restores skip it. The last
    checkpoint that was verified without errors is never deleted by a policy.
    With --heal, damaged checkpoints are read as well. A damaged object is written again if all its bytes are found in
    other checkpoints of the run or in the copy; then the checkpoint is verified once more.
    A daemon scrubs in a job: one checkpoint, a run or all checkpoints, at full speed.
    """
    session: Session = ctx.obj
    if copy is not None and not heal:
        raise InvalidRequest("--from is given without --heal", "Add --heal")
    checkpoint, run = (which, None) if which is not None and "@" in which else (None, which)
    wanted = _Wanted(checkpoint, run, older, limit, rate, heal, copy)
    session.dispatch(lambda: _scrub_by_job(session, wanted), lambda: _scrub_here(session, wanted))


@dataclass(frozen=True, slots=True)
class _Wanted:
    checkpoint: str | None
    run: str | None
    older: str | None
    limit: int | None
    rate: str | None
    heal: bool
    copy: str | None


def _scrub_here(session: Session, wanted: _Wanted) -> None:
    store = session.store("scrub")
    before = session.clock() - human.parse_duration(wanted.older) if wanted.older else float("inf")
    if wanted.checkpoint is not None:
        due = [session.source.find(Reference.parse(wanted.checkpoint))]
    else:
        runs = [Run(store, name, session.clock) for name in session.run_names(wanted.run)]
        due = due_for_scrub(runs, before, damaged=wanted.heal)[: wanted.limit]
    throttle = RateLimiter(human.parse_size(wanted.rate) if wanted.rate else 0, session.clock, time.sleep)
    copies = [open_store(wanted.copy)] if wanted.copy is not None else []
    with session.screen.progress("scrubbing", sum(checkpoint.needed_bytes for checkpoint in due)) as progress:
        heal_from = copies if wanted.heal else None
        results = list(scrub(store, due, operator(), session.clock, progress, throttle, heal_from=heal_from))
    damaged = [result for result in results if not result.ok]
    if not results:
        session.screen.note("no checkpoint is due")
    bodies = [VerificationBody.of(result) for result in results]
    session.screen.emit(bodies, [r.checkpoint.id for r in damaged], verification_blocks(results))
    _raise_if_damaged(len(damaged), len(results))


def _scrub_by_job(session: Session, wanted: _Wanted) -> None:
    if (wanted.older, wanted.limit, wanted.rate, wanted.copy) != (None, None, None, None):
        raise InvalidRequest(
            "--older, --limit, --rate and --from work on stores only", "For a daemon, use ckptd --scrub-days"
        )
    kind = HealJob if wanted.heal else VerifyJob
    request = kind(checkpoint=wanted.checkpoint, run=None if wanted.checkpoint else wanted.run)
    job = follow(session, session.daemon("scrub"), request)
    result = job.result or {}
    session.screen.emit(job, result.get("corrupt", []), job_blocks(job, session.clock()))
    _raise_if_damaged(result.get("num_corrupt", 0), result.get("checked", 0))


def _raise_if_damaged(num_damaged: int, num_checked: int) -> None:
    if num_damaged:
        raise CorruptObject(
            f"{num_damaged} of {human.count(num_checked, 'checkpoint')} damaged",
            "They are now listed as corrupt. Try ckptctl scrub --heal, with --from if there is a copy, or ckptctl rm",
        )
