"""pin, unpin, pins: named holds without expiry."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptctl.commands.arguments import CheckpointArgument, RunArgument
from ckptctl.commands.deletion import ReasonOption
from ckptctl.completion import checkpoint_names
from ckptctl.render import Row, Table, TableColumn
from ckptctl.session import Session
from ckptstore.errors import InvalidRequest
from ckptstore.retention.pins import NamedPin

PinnedArgument = Annotated[
    str,
    typer.Argument(metavar="RUN@STEP", help="RUN@STEP or RUN@STEP.ULID.", autocompletion=checkpoint_names),
]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the pin, for example: paper.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("pin")(pin)
    app.command("unpin")(unpin)
    app.command("pins")(show_pins)


def pin(ctx: typer.Context, checkpoint: CheckpointArgument, name: NameArgument, reason: ReasonOption = "") -> None:
    """Keep a checkpoint until it is unpinned, regardless of policies.

    A checkpoint may have several pins, and a name may pin several checkpoints.
    """
    session: Session = ctx.obj
    found = session.find(checkpoint)
    session.operator.pin(found, name, reason)
    session.screen.emit(NamedPin(id=found.id, name=name), [found.id], [f"pinned {found.id} as {name}"])


def unpin(ctx: typer.Context, checkpoint: PinnedArgument, name: NameArgument) -> None:
    """Remove a pin; a missing pin is ignored."""
    session: Session = ctx.obj
    if "@" not in checkpoint:
        raise InvalidRequest(
            f"{checkpoint!r} names a run, whose newest checkpoint may not be the pinned one",
            f"Use ckptctl unpin {checkpoint}@STEP {name}; ckptctl pins {checkpoint} lists the pins",
        )
    found = session.find(checkpoint)
    session.operator.unpin(found, name)
    session.screen.emit(NamedPin(id=found.id, name=name), [found.id], [f"unpinned {found.id} from {name}"])


def show_pins(ctx: typer.Context, run: RunArgument = None) -> None:
    """List pins, by run and step."""
    session: Session = ctx.obj
    found = [body for name in session.run_names(run) for body in session.operator.pins(name)]
    if not found:
        session.screen.note("no checkpoint is pinned")
    table = Table((TableColumn("CHECKPOINT"), TableColumn("PIN")), [Row((body.id, body.name)) for body in found])
    session.screen.emit(found, [body.id for body in found], [table] if found else [])
