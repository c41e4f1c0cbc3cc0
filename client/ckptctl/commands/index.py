"""reindex: rebuilds the daemon's index from the store."""

from __future__ import annotations

import typer

from ckptctl.session import Session
from ckptstore import human


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("reindex")(reindex)


def reindex(ctx: typer.Context) -> None:
    """Rebuild the index of a daemon from the store.

    No data is lost: the index is a cache of the store.
    """
    session: Session = ctx.obj
    found = session.daemon("reindex").reindex()
    text = f"Indexed {human.count(found.checkpoints, 'checkpoint')} of {human.count(found.runs, 'run')}"
    session.screen.emit(found, [], [text])
