"""pin: named holds without expiry."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptctl.commands.arguments import ReasonOption
from ckptctl.completion import checkpoint_names
from ckptctl.render import Row, Table
from ckptctl.session import Session
from ckptstore.errors import InvalidRequest
from ckptstore.retention.pins import NamedPin


def pin(
    ctx: typer.Context,
    checkpoint: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN[@STEP]",
            help="The checkpoint; RUN for its newest one. Without NAME: the runs to list; * and ? are wildcards.",
            show_default=False,
            autocompletion=checkpoint_names,
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Name of the pin, for example: paper.", show_default=False)
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the pin; a missing one is ignored.")] = False,
    reason: ReasonOption = "",
) -> None:
    """Keep a checkpoint until the pin is removed, regardless of policies. Without NAME: list pins.

    A checkpoint may have several pins, and a name may pin several checkpoints.
    """
    session: Session = ctx.obj
    if name is None or checkpoint is None:
        _list(session, checkpoint, remove)
        return
    if remove and "@" not in checkpoint:
        raise InvalidRequest(
            f"{checkpoint!r} names a run, whose newest checkpoint may not be the pinned one",
            f"Use ckptctl pin {checkpoint}@STEP {name} --remove; ckptctl pin {checkpoint} lists the pins",
        )
    found = session.find(checkpoint)
    if remove:
        session.operator.unpin(found, name)
    else:
        session.operator.pin(found, name, reason)
    text = f"unpinned {found.id} from {name}" if remove else f"pinned {found.id} as {name}"
    session.screen.emit(NamedPin(id=found.id, name=name), [found.id], [text])


def _list(session: Session, run: str | None, remove: bool) -> None:
    if remove or (run is not None and "@" in run):
        raise InvalidRequest("no name of a pin is given", "Use ckptctl pin RUN@STEP NAME")
    found = [body for each in session.run_names(run) for body in session.operator.pins(each)]
    if not found:
        session.screen.note("no checkpoint is pinned")
    table = Table(("CHECKPOINT", "PIN"), [Row((body.id, body.name)) for body in found])
    session.screen.emit(found, [body.id for body in found], [table] if found else [])
