"""import: the state in another program's file as a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from ckptapi.arbiter import arbitrated
from ckptctl.importing import new_attempt, write_checkpoint
from ckptctl.importing_formats import ForeignFormat, choose_format, read_foreign
from ckptctl.session import Session
from ckptstore import human
from ckptstore.run import Run


class ImportBody(msgspec.Struct, frozen=True, kw_only=True):
    """What was imported, as JSON. `notes`: what restores less than it could."""

    id: str
    path: str
    format: ForeignFormat
    items: list[str]
    num_entries: int
    raw_bytes: int
    stored_bytes: int
    notes: list[str]


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("import")(import_checkpoint)


def import_checkpoint(
    ctx: typer.Context,
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A file or folder on this machine.")],
    to: Annotated[str, typer.Argument(metavar="RUN@STEP", help="The checkpoint that it becomes.")],
    format: Annotated[ForeignFormat | None, typer.Option("--format", help="If the path does not tell.")] = None,
    item: Annotated[
        str, typer.Option(metavar="NAME", help="The item that a state becomes which is no dict of items.")
    ] = "model",
) -> None:
    """Make a checkpoint of a torch.save file, a DCP folder or safetensors (a file, an index, or their folder).

    Nothing in the file is executed. A dict without tensors at its top is taken as items: "model" (also state_dict),
    "optim" (also optimizer), and others; anything else becomes the item NAME. The checkpoint exists only when
    everything is in the store, and no checkpoint is replaced.
    """
    session: Session = ctx.obj
    # Where the store lets several committers win, the daemon decides.
    store = arbitrated(session.store("import"), os.environ.get("CKPTD_URL"), os.environ.get("CKPT_TOKEN"))
    run, attempt = new_attempt(store, to, session.clock)
    kind = choose_format(path, format)
    foreign = read_foreign(path, kind, item)
    with session.screen.progress("importing", foreign.raw_bytes) as progress:
        made = write_checkpoint(Run(store, run, session.clock), attempt, foreign, progress)
    for note in foreign.notes:
        session.screen.note(note)
    body = ImportBody(
        id=made.id,
        path=str(path),
        format=kind,
        items=sorted(foreign.trees),
        num_entries=made.num_entries,
        raw_bytes=made.raw_bytes,
        stored_bytes=made.stored_bytes,
        notes=foreign.notes,
    )
    entries = human.count(body.num_entries, "entry")
    text = f"Imported {entries} ({human.size(body.raw_bytes)}) from {path} as {made.id}"
    session.screen.emit(body, [made.id], [text])
