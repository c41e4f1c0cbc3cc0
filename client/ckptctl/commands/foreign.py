"""export: one checkpoint as files for other programs. import: another program's file as a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from ckpt.foreign import importing
from ckpt.foreign.exporting import Export, FileFormat, choose_format, select, size_on_disk, write_whole, writer_of
from ckpt.foreign.importing import ForeignFormat
from ckptapi.remote_create import with_remote_create
from ckptctl.commands.arguments import CheckpointArgument
from ckptctl.commands.show import find_readable
from ckptctl.session import Session, leased
from ckptstore import human
from ckptstore.errors import PartlyDone
from ckptstore.reading.source import read_local, read_manifest
from ckptstore.run import Run

_MODEL = "model/*"


class ExportBody(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an export, as JSON."""

    id: str
    path: str
    format: FileFormat
    num_entries: int
    raw_bytes: int
    file_bytes: int
    left_out: list[str]
    """Items that each rank keeps for itself, which are in no export. The exit code is 3 if there are any."""
    positions: list[str]
    """Positions in data loaders, which are in no export either."""


def export(
    session: Session,
    checkpoint: CheckpointArgument,
    to: Annotated[
        Path,
        typer.Option("--to", metavar="PATH", help="Output path; the suffixes .safetensors and .pt set the format."),
    ],
    format: Annotated[
        FileFormat | None, typer.Option("--format", help="Required if the suffix does not set it.")
    ] = None,
    names: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="Only entries whose name matches, for example 'model/*'.")
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Maximum file size in a Hugging Face folder, for example 5GB or 500MB.")
    ] = "5GB",
    dtype: Annotated[
        str | None, typer.Option(metavar="TYPE", help="Round float32 tensors to bfloat16 or float16 (safetensors).")
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace the file if it exists.")] = False,
) -> None:
    """Write a checkpoint to a .safetensors or .pt file, or to a folder for Hugging Face or torch's DCP.

    \b
    safetensors  the tensors by their full names; tied weights once, with aliases in the metadata
    torch        the state as it was saved, as one nested dict, for torch.load(weights_only=True)
    huggingface  a folder: one item's tensors (--names, else the model's) without the item's name,
                 in several files with an index if they are large
    dcp          a folder: the state as it was saved, for torch.distributed.checkpoint.load

    Every chunk is verified, and memory use does not grow with the checkpoint. PATH appears only when it is complete
    and durable. State that each rank keeps for itself is left out. If there are tensors in it other than those of
    random state and of data loaders, and --names is not given, the exit code is 3. torch and dcp need the same amount
    of disk space again next to PATH while they write.
    """
    kind = choose_format(to, format, dtype)
    write = writer_of(kind, human.parse_size(max_shard_size))
    found = find_readable(session.source, checkpoint)
    with leased(session.source, found):
        manifest = read_manifest(session.source, found)
        content, local = manifest.content, read_local(session.source, found, manifest, 0)
        selection = select(found, content, names or (_MODEL if kind is FileFormat.HUGGINGFACE else None), local)
        with session.screen.progress("reading", selection.raw_bytes) as progress:
            task = Export(session.source, found, content, selection, progress, dtype)
            write_whole(to, kind, force, lambda path: write(task, path))
    body = ExportBody(
        id=found.id,
        path=str(to),
        format=kind,
        num_entries=len(selection.entries),
        raw_bytes=selection.raw_bytes,
        file_bytes=size_on_disk(to),
        left_out=list(selection.left_out),
        positions=list(selection.positions),
    )
    entries = human.count(body.num_entries, "entry")
    text = f"Wrote {entries} of {found.id} to {to} ({human.size(body.file_bytes)})"
    session.screen.emit(body, [found.id], [text])
    _report_left_out(session, body)


def _report_left_out(session: Session, body: ExportBody) -> None:
    """Raises PartlyDone unless only positions of data loaders were left out."""
    if body.positions:
        session.screen.note(
            f"without the positions of data loaders, which no other program reads: {', '.join(body.positions)}"
        )
    if body.left_out:
        raise PartlyDone(
            f"left out, because each rank has its own: {', '.join(body.left_out)}",
            "Save what all ranks hold alike as shared={...}, or select a part with --names",
        )


class ImportBody(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an import, as JSON. `notes`: parts that cannot be restored completely."""

    id: str
    path: str
    format: ForeignFormat
    items: list[str]
    num_entries: int
    raw_bytes: int
    stored_bytes: int
    notes: list[str]


def import_checkpoint(
    session: Session,
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
    kind, session.creates = importing.choose_format(path, format), True
    # If the store's create-only writes overwrite, the daemon decides who commits.
    store = with_remote_create(session.store("import"), os.environ.get("CKPTD_URL"), os.environ.get("CKPT_TOKEN"))
    run, attempt = importing.new_attempt(store, to, session.clock)
    foreign = importing.read_foreign(path, kind, item)
    with session.screen.progress("importing", foreign.raw_bytes) as progress:
        made = importing.write_checkpoint(Run(store, run, session.clock), attempt, foreign, progress)
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
