"""goodput: what became of the time of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from ckptctl.render import Block, Row, Table
from ckptctl.session import Session
from ckptstore import human
from ckptstore.analysis.goodput import Account, AttemptAccount, EndOf, Spent, openmetrics, read_account
from ckptstore.names import check_run
from ckptstore.run import Run

_STYLES = {EndOf.RUNNING: "green", EndOf.DIED: "red", EndOf.VANISHED: "red", EndOf.ERROR: "red"}
_WORDS = {
    Spent.PRODUCTIVE: "steps that were kept",
    Spent.STALL: "saves held training up",
    Spent.SLOWDOWN: "steps were slower because of saves",
    Spent.RESTORE: "restores",
    Spent.RESTART: "starts of processes, before the restore or the first step",
    Spent.LOST: "training after the checkpoint that was resumed from",
    Spent.WAITING: "no trainer ran",
}


def goodput(
    session: Session,
    run: Annotated[str, typer.Argument(metavar="RUN")],
    metrics: Annotated[
        bool, typer.Option("--openmetrics", help="Print OpenMetrics, for a node exporter's text files.")
    ] = False,
) -> None:
    """Show what became of the time of a run: productive steps, saves, restores, restarts, lost work, waiting.

    Then each attempt of the job: from which checkpoint it resumed, what it lost, and how it ended. The categories are
    those of Google's ML Productivity Goodput, and -o json has its names. With heartbeats figures are exact to a minute
    per attempt; without, only the times of captures are known. With -o id it prints the attempts.
    """
    check_run(run)
    if session.target.is_daemon:
        found = session.daemon("goodput").goodput(run)
    else:
        found = read_account(Run(session.store("goodput"), run, session.clock))
    if metrics:
        print(openmetrics([found]), end="")
        return
    session.screen.emit(found, [attempt.id for attempt in found.attempts], _blocks(found))


def _blocks(found: Account) -> Iterator[Block]:
    total, local = sum(found.seconds.values()), found.local_only
    facts = {
        "run": found.run,
        "goodput": _share(found.goodput),
        "time": f"{human.duration(total)}, since {human.moment(found.began_at)}",
        "steps": f"{found.step:,} reached, {found.lost_steps:,} done twice",
    }
    if local and local.newest is not None:
        facts["newest local"] = f"step {local.newest:,}"
    if local and local.checkpoints:
        facts["local only"] = f"{local.checkpoints:,}, {human.size(local.bytes)}"
    yield facts
    yield ""
    yield Table(
        ("CATEGORY", ">TIME", ">SHARE", "WHAT/1"),
        [
            (kind, human.duration(seconds), _share(seconds / total if total else 0.0), _WORDS[Spent(kind)])
            for kind, seconds in found.seconds.items()
        ],
    )
    yield ""
    yield Table(
        (">ATTEMPT", "BEGAN/3", ">FROM STEP", ">TO STEP", ">LOST", ">TOOK/1", ">STALL/2", "ENDED", "WHERE/4"),
        [Row(_cells(number, one), _STYLES.get(one.ended, "")) for number, one in enumerate(found.attempts, start=1)],
    )
    if not all(one.measured for one in found.attempts):
        yield ""
        yield "* without heartbeats: its costs and its end are not known"


def _cells(number: int, one: AttemptAccount) -> tuple[str, ...]:
    return (
        f"{number}" + ("" if one.measured else "*"),
        human.moment(one.began_at),
        f"{one.resumed_from:,}" if one.resumed_from is not None else "-",
        f"{one.last_step:,}",
        f"{one.lost_steps:,}",
        human.duration(one.ended_at - one.began_at),
        human.duration(one.seconds[Spent.STALL]),
        one.ended,
        str(one.origin or "-"),
    )


def _share(part: float) -> str:
    return f"{100 * part:.1f} %"
