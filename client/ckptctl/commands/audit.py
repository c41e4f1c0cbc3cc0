"""audit: who deleted what, when and why."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptctl.commands.arguments import RunOption
from ckptctl.render import Column, Row, Table
from ckptctl.session import Session
from ckptstore import human
from ckptstore.audit import read_log
from ckptstore.wire import AuditBody


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("audit")(audit)


def audit(
    ctx: typer.Context,
    run: RunOption = None,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="The newest N of each run.")] = 100,
) -> None:
    """Show who deleted, took back, swept or pinned what, newest first.

    A record is written before what it names is done. Records are kept for a year.
    """
    session: Session = ctx.obj
    store = session.store("audit")
    runs = [run] if run is not None else session.source.runs()
    found = [AuditBody.of(name, record) for name in runs for record in read_log(store, name, limit)]
    found.sort(key=lambda body: body.at, reverse=True)
    if not found:
        session.screen.note("nothing is recorded")
    columns = (
        Column("WHEN"),
        Column("WHO", drop=1),
        Column("DID"),
        Column("REASON", drop=2),
        Column("CHECKPOINTS"),
    )
    rows = [Row((human.moment(b.at), b.by, b.action, b.reason, _ids(b.ids))) for b in found]
    session.screen.emit(found, [id for body in found for id in body.ids], [Table(columns, rows)] if rows else [])


def _ids(ids: list[str]) -> str:
    return ids[0] if len(ids) == 1 else f"{human.count(len(ids), 'checkpoint')}: {', '.join(ids)}"
