"""audit: who deleted what, when and why."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptapi.bodies import MAX_PAGE
from ckptctl.commands.arguments import RunArgument
from ckptctl.render import Row, Table
from ckptctl.session import Session
from ckptstore import human


def audit(
    session: Session,
    run: RunArgument = None,
    limit: Annotated[int, typer.Option(min=1, max=MAX_PAGE, metavar="N", help="Show the newest N of each run.")] = 100,
) -> None:
    """Show the audit log, newest first: who deleted, undeleted, swept or pinned which checkpoints.

    A record is written before its action. Records are kept for a year.
    """
    found = [body for name in session.run_names(run) for body in session.operator.audit(name, limit)]
    found.sort(key=lambda body: body.at, reverse=True)
    columns = ("WHEN, UTC", "WHO/2", "DID", "REASON/1", "CHECKPOINTS")
    rows = [Row((human.moment(b.at).removesuffix(" UTC"), b.by, b.action, b.reason, _ids(b.ids))) for b in found]
    ids = [id for body in found for id in body.ids]
    session.screen.emit(found, ids, [Table(columns, rows)], none="the audit log is empty")


def _ids(ids: list[str]) -> str:
    return ids[0] if len(ids) == 1 else f"{human.count(len(ids), 'checkpoint')}: {', '.join(ids)}"
