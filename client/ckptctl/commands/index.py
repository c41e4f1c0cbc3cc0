"""reindex: the daemon's index, made anew from the store."""

from __future__ import annotations

import typer

from ckptctl.session import Session
from ckptstore import human


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("reindex")(reindex)


def reindex(ctx: typer.Context) -> None:
    """Make a daemon rebuild its index from the store.

    Loses nothing: the store is the truth.
    """
    session: Session = ctx.obj
    found = session.daemon("reindex").reindex()
    text = f"Indexed {human.count(found.checkpoints, 'checkpoint')} of {human.count(found.runs, 'run')}"
    session.screen.emit(found, [], [text])
