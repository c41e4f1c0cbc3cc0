"""drill: proves that a checkpoint restores on N ranks, and estimates how long that takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated

import typer

from ckptapi.bodies import DrillBody, DrillJob
from ckptctl.commands.jobs import follow
from ckptctl.completion import checkpoint_names
from ckptctl.render import Block, Facts, Row, Table, TableColumn
from ckptctl.session import Session, parse_reference
from ckptstore import human
from ckptstore.commits.audit import operator
from ckptstore.errors import CorruptObject, InvalidRequest, NoCheckpoint
from ckptstore.format.decoding import convert
from ckptstore.names import Reference
from ckptstore.retention.drilling import MAX_RANKS, drill, last_drill
from ckptstore.retention.scrubbing import RateLimiter
from ckptstore.run import Run


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("drill")(drill_checkpoint)


def drill_checkpoint(
    ctx: typer.Context,
    checkpoint: Annotated[
        str,
        typer.Argument(metavar="RUN[@STEP]", help="By default the newest one.", autocompletion=checkpoint_names),
    ],
    ranks: Annotated[
        list[int] | None,
        typer.Option(min=1, max=MAX_RANKS, metavar="N", help="Plan for N ranks. May be repeated.", show_default=False),
    ] = None,
    last: Annotated[bool, typer.Option("--last", help="Show the last drill of the run; read nothing else.")] = False,
    rate: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Maximum bytes per second: 50MB, 1GiB.", show_default=False)
    ] = None,
) -> None:
    """Prove that a checkpoint restores, and estimate how long that takes.

    Plans the restore of every rank, cut along the first dimension as FSDP2 does; restores up to 256 MiB into memory at
    full speed; reads, verifies and decodes everything else once. The number of ranks that saved is always among the
    layouts. A checkpoint that fails is listed as corrupt from then on. With -o id it prints it.
    ALONE is the time of a restore if each rank reads as fast as the drill did. TOGETHER is the time if all ranks share
    this speed, on one host or at the limit of the store.
    """
    session: Session = ctx.obj
    reference = parse_reference(checkpoint)
    if last and (ranks or rate):
        raise InvalidRequest("--last drills nothing", "Leave out --ranks and --rate, or --last")
    if last:
        body = session.dispatch(
            lambda: session.daemon("drill").last_drill(reference.run), lambda: _last(session, reference.run)
        )
    else:
        body = session.dispatch(
            lambda: _by_job(session, reference, ranks or [], rate),
            lambda: _here(session, reference, ranks or [], rate),
        )
    session.screen.emit(body, [] if body.ok else [body.id], _blocks(body, session.clock()))
    if not body.ok:
        raise CorruptObject(
            f"{body.id} cannot be restored",
            "It is now listed as corrupt. Try ckptctl scrub --heal, with --from if there is a copy",
        )


def _last(session: Session, run: str) -> DrillBody:
    found = last_drill(Run(session.store("drill"), run, session.clock))
    if found is None:
        raise NoCheckpoint(f"no checkpoint of run {run!r} was drilled", f"ckptctl drill {run}")
    return DrillBody.of(run, found)


def _here(session: Session, reference: Reference, ranks: list[int], rate: str | None) -> DrillBody:
    run = Run(session.store("drill"), reference.run, session.clock, operator())
    found = session.source.find(reference)
    throttle = RateLimiter(human.parse_size(rate) if rate else 0, session.clock, time.sleep)
    with session.screen.progress("drilling", found.needed_bytes) as progress:
        done = drill(run, found, ranks, progress, throttle)
    return _present(None if done is None else DrillBody.of(run.name, done), reference)


def _by_job(session: Session, reference: Reference, ranks: list[int], rate: str | None) -> DrillBody:
    if rate is not None:
        raise InvalidRequest("--rate works on stores only", "For a daemon, use ckptd --scrub-bytes-per-second")
    job = follow(session, session.daemon("drill"), DrillJob(checkpoint=str(reference), ranks=ranks))
    (drilled,) = (job.result or {}).get("drills") or [None]
    return _present(None if drilled is None else convert(drilled, DrillBody), reference)


def _present(body: DrillBody | None, reference: Reference) -> DrillBody:
    if body is None:
        raise NoCheckpoint(f"{reference} was deleted in the meantime", "ckptctl ls shows what there is")
    return body


def _blocks(body: DrillBody, now: float) -> Iterator[Block]:
    drilled = f"{human.moment(body.last_drilled_at)}, {human.age(now - body.last_drilled_at)} ago, by {body.by}"
    facts = [
        ("checkpoint", body.id),
        ("result", "restores" if body.ok else human.count(len(body.problems), "problem")),
        ("drilled", drilled),
        ("took", human.duration(body.drill_s)),
        ("read", human.size(body.stored_bytes)),
    ]
    if body.bytes_per_s:
        facts.append(("speed", f"{human.size(int(body.bytes_per_s))} per second"))
    yield Facts(facts)
    if body.layouts:
        yield ""
        yield Table(
            (
                TableColumn("RANKS", right=True),
                TableColumn("BUSIEST READS", right=True),
                TableColumn("ALL READ", right=True, drop=1),
                TableColumn("ALONE", right=True),
                TableColumn("TOGETHER", right=True),
            ),
            [
                Row(
                    (
                        f"{one.ranks:,}",
                        human.size(one.busiest_bytes),
                        human.size(one.read_bytes),
                        _duration(one.restore_s),
                        _duration(one.shared_s),
                    )
                )
                for one in body.layouts
            ],
        )
    if body.problems:
        yield ""
        yield from (f"  {problem}" for problem in body.problems)


def _duration(seconds: float | None) -> str:
    return "unknown" if seconds is None else human.duration(seconds)
