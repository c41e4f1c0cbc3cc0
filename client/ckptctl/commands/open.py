"""open: opens a page of the dashboard in a browser."""

from __future__ import annotations

import webbrowser
from typing import Annotated
from urllib.parse import quote

import typer

from ckptctl.completion import checkpoint_names
from ckptctl.session import Session, parse_reference
from ckptstore.names import check_run


def open_page(
    ctx: typer.Context,
    which: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN[@STEP]",
            help="The page of a run or checkpoint; without it, the list of runs.",
            show_default=False,
            autocompletion=checkpoint_names,
        ),
    ] = None,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Only print the address.")] = True,
) -> None:
    """Open the dashboard of a daemon in a browser, and print its address.

    The environment variable BROWSER names the program. Without a browser, the address is only printed.
    """
    session: Session = ctx.obj
    daemon = session.daemon("open")
    page = daemon.url + _path(session, which)
    if browser and not webbrowser.open(page):
        session.screen.note("no browser was found: open this address yourself")
    session.screen.emit({"url": page}, [page], [page])


def _path(session: Session, which: str | None) -> str:
    if which is None:
        return "/"
    if "@" not in which:
        return f"/runs/{quote(check_run(which), safe='')}"
    found = session.source.find(parse_reference(which))
    return f"/checkpoints/{quote(found.id, safe='@')}"
