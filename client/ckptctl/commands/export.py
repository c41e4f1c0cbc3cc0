"""export: one checkpoint as a file for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from ckptctl import human
from ckptctl.commands.arguments import CheckpointArgument
from ckptctl.commands.show import find_readable
from ckptctl.exporting import FileFormat, choose_format, fetch_entries, select, write_whole, writer_of
from ckptctl.session import Session
from ckptctl.target import leased
from ckptstore.source import read_manifest


class ExportBody(msgspec.Struct, frozen=True, kw_only=True):
    """What was exported, as JSON."""

    id: str
    path: str
    format: FileFormat
    num_entries: int
    raw_bytes: int
    file_bytes: int


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("export")(export)


def export(
    ctx: typer.Context,
    checkpoint: CheckpointArgument,
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="Where to; .safetensors or .pt tells the format.")],
    format: Annotated[FileFormat | None, typer.Option("--format", help="If the suffix does not tell.")] = None,
    names: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="Only entries with such a name, like 'model/*'.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace the file if it exists.")] = False,
) -> None:
    """Write a checkpoint to a .safetensors or .pt file.

    A .pt file is for torch.load(weights_only=True) and holds the state as it was saved, as one nested dict.
    A .safetensors file holds the tensors by their full names; tied weights are in it once, and its metadata maps the
    other names to them. Every chunk is checked on the way; FILE appears only when it is whole and durable.
    """
    session: Session = ctx.obj
    kind = choose_format(to, format)
    write = writer_of(kind)
    found = find_readable(session.source, checkpoint)
    with leased(session.source, found):
        content = read_manifest(session.source, found).content
        selection = select(found, content, names)

        def fill(path: Path) -> None:
            with session.screen.progress("reading", selection.raw_bytes) as progress:
                data = fetch_entries(session.source, found, content, selection, progress)
            write(found, content, selection, data, path)

        write_whole(to, force, fill)
    body = ExportBody(
        id=found.id,
        path=str(to),
        format=kind,
        num_entries=len(selection.entries),
        raw_bytes=selection.raw_bytes,
        file_bytes=to.stat().st_size,
    )
    entries = human.count(body.num_entries, "entry")
    text = f"Wrote {entries} of {found.id} to {to} ({human.size(body.file_bytes)})"
    session.screen.emit(body, [found.id], [text])
