"""import: stores the state in another program's file as a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from ckpt.foreign.importing import ForeignFormat, choose_format, new_attempt, read_foreign, write_checkpoint
from ckptapi.remote_create import with_remote_create
from ckptctl.session import Session
from ckptstore import human
from ckptstore.run import Run


class ImportBody(msgspec.Struct, frozen=True, kw_only=True):
    """What was imported, as JSON. `notes`: parts that cannot be restored completely."""

    id: str
    path: str
    format: ForeignFormat
    items: list[str]
    num_entries: int
    raw_bytes: int
    stored_bytes: int
    notes: list[str]


def import_checkpoint(
    ctx: typer.Context,
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A file or folder on this machine.")],
    to: Annotated[str, typer.Argument(metavar="RUN@STEP", help="The new checkpoint: RUN@STEP.")],
    format: Annotated[ForeignFormat | None, typer.Option("--format", help="Required if it cannot be detected.")] = None,
    item: Annotated[
        str, typer.Option(metavar="NAME", help="The name of the item if the state is not a dict of items.")
    ] = "model",
) -> None:
    """Import a torch.save file, a DCP folder or safetensors (a file, an index, or their folder) as a checkpoint.

    Nothing in the file is executed. A dict without tensors at its top level is split into items: "model" (also
    state_dict), "optim" (also optimizer), and others; any other state becomes the item NAME. The checkpoint is
    committed when all data is in the store. Existing checkpoints are never replaced.
    """
    session: Session = ctx.obj
    kind = choose_format(path, format)
    # If the store's create-only writes overwrite, the daemon decides who commits.
    store = with_remote_create(session.store("import"), os.environ.get("CKPTD_URL"), os.environ.get("CKPT_TOKEN"))
    run, attempt = new_attempt(store, to, session.clock)
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
