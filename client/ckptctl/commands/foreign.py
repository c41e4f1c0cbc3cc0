"""export: one checkpoint as files for other programs. import: another program's file as a checkpoint. merge: several
checkpoints as one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from math import fsum, inf
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from ckpt.foreign import importing
from ckpt.foreign.exporting import (
    Export,
    FileFormat,
    Selection,
    choose_format,
    select,
    select_named,
    size_on_disk,
    write_whole,
    writer_of,
)
from ckpt.foreign.importing import ForeignFormat
from ckpt.foreign.parts import ForeignSlice, ForeignState
from ckptapi.remote_create import with_remote_create
from ckptctl.commands.arguments import a_checkpoint, a_flag, an_argument, an_option
from ckptctl.commands.fleet import in_units
from ckptctl.render import Table, printable
from ckptctl.session import Session
from ckptstore import human
from ckptstore.codecs.dtypes import cast, numbers_of
from ckptstore.commits.catalog import Checkpoint
from ckptstore.commits.labels import LabelChange
from ckptstore.errors import InvalidRequest, PartlyDone
from ckptstore.format.planning import entry_bytes
from ckptstore.format.shards import Slice
from ckptstore.reading.safetensors import StoredTensor
from ckptstore.reading.source import read_local, read_manifest
from ckptstore.reading.weights import ONLY, VirtualFile, Weights
from ckptstore.retention.pruning import check_limit
from ckptstore.stores import Store

_MODEL = "model/*"
_ROUND: dict[str, Callable[[Any], Any]] = {
    **{name: partial(np.asarray, dtype=name) for name in ("float64", "float32", "float16")},
    "bfloat16": lambda sums: cast(sums.astype(np.float32).view(np.uint32), "bfloat16"),
}
"""Functions that round float64 to elements of a type."""


@in_units("checkpoint", lambda session, checkpoint, to, **_: _destinations(session, checkpoint, to).values())
def export(
    session: Session,
    checkpoint: Annotated[
        list[str], a_checkpoint("RUN@STEP, or RUN for its newest checkpoint; * and ? are wildcards.", "RUN[@STEP]")
    ],
    to: Annotated[
        Path,
        an_option(
            "Output path; the suffixes .safetensors and .pt set the format. For several: {run} and {step} in it.",
            "PATH",
        ),
    ],
    format: Annotated[FileFormat | None, an_option("Required if the suffix does not set it.")] = None,
    names: Annotated[
        str | None, an_option("Only entries whose name matches, for example 'model/*'.", "PATTERN")
    ] = None,
    max_shard_size: Annotated[
        str, an_option("Maximum file size in a Hugging Face folder, for example 5GB or 500MB.", "SIZE")
    ] = "5GB",
    dtype: Annotated[
        str | None, an_option("Round float32 tensors to bfloat16 or float16 (safetensors).", "TYPE")
    ] = None,
    force: Annotated[bool, a_flag("Replace the file if it exists.", "--force", "-f")] = False,
) -> None:
    """Write a checkpoint to a .safetensors or .pt file, or to a folder for Hugging Face or torch's DCP.

    \b
    safetensors  the tensors by their full names; tied weights once, with aliases in the metadata
    torch        the state as it was saved, as one nested dict, for torch.load(weights_only=True)
    huggingface  a folder: one item's tensors (--names, else the model's) without the item's name,
                 in several files with an index if they are large
    peft         the same of a checkpoint with adapters: their tensors and configurations alone
    dcp          a folder: the state as it was saved, for torch.distributed.checkpoint.load

    Every chunk is verified, in bounded memory. PATH appears only when it is complete and durable. State that each rank
    keeps for itself is left out. If it has tensors other than those of random state and of data loaders, and --names is
    not given, the exit code is 3. torch and dcp need the same disk space again next to PATH while they write.
    """
    kind, bodies = choose_format(to, format, dtype), list[dict[str, Any]]()
    write = writer_of(kind, human.parse_size(max_shard_size))
    for path, chosen in _destinations(session, checkpoint, to).items():
        found = session.find_readable(chosen.id)
        with session.leased(found):
            manifest = read_manifest(session.source, found)
            content, local = manifest.content, read_local(session.source, found, manifest, 0)
            selection = select(found, content, names or (_MODEL if kind.is_model else None), local)
            if kind.is_model:
                selection = select_named(session.source, found, content, selection)
            raw_bytes = sum(map(entry_bytes(content).__getitem__, selection.entries))
            if path != to:
                path.parent.mkdir(parents=True, exist_ok=True)
            if path == to or force or not path.exists():  # one of several that exists is complete
                with session.screen.progress("reading", raw_bytes) as progress:
                    task = Export(session.source, found, content, selection, progress, dtype)
                    write_whole(path, kind, force, partial(write, task))
        bodies.append(_body(found.id, path, kind, selection, raw_bytes))
    _report_exports(session, bodies)


def _body(id: str, path: Path, kind: FileFormat, selection: Selection, raw_bytes: int) -> dict[str, Any]:
    return {
        "id": id,
        "path": str(path),
        "format": kind,
        "num_entries": len(selection.entries),
        "raw_bytes": raw_bytes,
        "file_bytes": size_on_disk(path),
        "left_out": selection.left_out,
        "positions": selection.positions,
    }


def _report_exports(session: Session, bodies: Sequence[dict[str, Any]]) -> None:
    """Raises PartlyDone unless only positions of data loaders were left out."""
    lines = [
        f"Wrote {human.count(one['num_entries'], 'entry')} of {one['id']} to {one['path']} "
        f"({human.size(one['file_bytes'])})"
        for one in bodies
    ]
    session.screen.emit(bodies[0] if len(bodies) == 1 else bodies, [one["id"] for one in bodies], lines)
    for one in bodies:
        if one["positions"]:
            session.screen.note(
                f"without the positions of data loaders, which no other program reads: {', '.join(one['positions'])}"
            )
        if one["left_out"]:
            raise PartlyDone(
                f"left out, because each rank has its own: {', '.join(one['left_out'])}",
                "Save what all ranks hold alike as shared={...}, or select a part with --names",
            )


def _destinations(session: Session, which: Sequence[str], to: Path) -> dict[Path, Checkpoint]:
    """Where each checkpoint is written. Raises InvalidRequest if several would be written to the same place."""
    chosen = {c.id: c for text in which for c in session.labelled(text)}.values()
    places = {Path(str(to).replace("{run}", c.run).replace("{step}", str(c.step))): c for c in chosen}
    if len(places) < len(chosen):
        raise InvalidRequest(
            f"{len(chosen)} checkpoints are written to {human.count(len(places), 'place')}",
            "Name them by run and step: --to '{run}/{step}.safetensors'",
        )
    return places


def import_checkpoint(
    session: Session,
    path: Annotated[Path, an_argument("A file or folder on this machine.", "PATH")],
    to: Annotated[str, an_argument("The new checkpoint: RUN@STEP.", "RUN@STEP")],
    format: Annotated[ForeignFormat | None, an_option("Required if it cannot be detected.")] = None,
    item: Annotated[str, an_option("The name of the item if the state is not a dict of items.", "NAME")] = "model",
) -> None:
    """Import a torch.save file, safetensors (a file, an index, or their folder), or a folder of DCP, DeepSpeed,
    Accelerate, transformers' Trainer or Orbax, as a checkpoint.

    Nothing in the file is executed. A dict without tensors at its top level is split into items: "model" (also
    state_dict), "optim" (also optimizer), and others; any other state becomes the item NAME. The checkpoint is
    committed when all data is in the store. Existing checkpoints are never replaced.
    """
    kind, session.creates = importing.choose_format(path, format), True
    run, attempt = importing.new_attempt(_store(session, "import"), to, session.clock)
    foreign = importing.read_foreign(path, kind, item)
    check_limit(run, foreign.raw_bytes)
    with session.screen.progress("importing", foreign.raw_bytes) as progress:
        made = importing.write_checkpoint(run, attempt, foreign, progress)
    for note in foreign.notes:
        session.screen.note(note)
    body = {
        "id": made.id,
        "path": str(path),
        "format": kind,
        "items": sorted(foreign.trees),
        "num_entries": made.num_entries,
        "raw_bytes": made.raw_bytes,
        "stored_bytes": made.stored_bytes,
        "notes": foreign.notes,
    }
    entries = human.count(made.num_entries, "entry")
    text = f"Imported {entries} ({human.size(made.raw_bytes)}) from {path} as {made.id}"
    session.screen.emit(body, [made.id], [text])


def merge(
    session: Session,
    checkpoints: Annotated[list[str], a_checkpoint("Two or more checkpoints, in order.", "RUN[@STEP]...")],
    to: Annotated[str, an_option("The new one; by default with their largest step.", "RUN[@STEP]")],
    weights: Annotated[str, an_option("Their shares, as 1,2,1; equal by default.", "X,X,...")] = "",
    ema: Annotated[
        float | None, an_option("Exponential average in this order, as 0.999.", "DECAY", min=0, max=1)
    ] = None,
) -> None:
    """Average the models of checkpoints, by name, and save the result as a checkpoint without an optimizer.

    Sums are made in float64, and rounded to the type of the tensor. Integers must be equal; counters (single numbers)
    come from the last checkpoint. Names, types and shapes must agree. Tags of the new checkpoint name its parents.
    Memory does not grow with the checkpoints.
    """
    store, shares = _store(session, "merge"), _shares(len(checkpoints), weights, ema)
    found = [session.find_readable(text) for text in checkpoints]
    ids, counters = [one.id for one in found], set[str]()
    with session.leased(*found):
        contents = [read_manifest(session.source, one).content for one in found]
        files = [Weights.of(content, naming=str).files(sys.maxsize)[ONLY] for content in contents]
        _require_alike(session, ids, files)

        def average(tensor: StoredTensor, start: int, into: memoryview) -> None:
            kind, seen, total = tensor.dtype.replace("complex64", "float32"), set[bytes](), np.zeros(())
            for one, file, share in zip(found, files, shares, strict=True):
                file.read(session.source, one, tensor.at + start, into)
                if kind in _ROUND:
                    total = total + share * numbers_of(kind, into).astype(float)
                else:
                    seen.add(bytes(into))
            if kind in _ROUND:
                into[:] = _ROUND[kind](total).view(np.uint8).data
            elif len(seen) > 1:
                if tensor.shape:
                    raise InvalidRequest(f"{tensor.name} differs, and is {kind}", "Only floating-point numbers may")
                counters.add(tensor.name)

        last = contents[-1]
        parts = [
            ForeignSlice(Slice.whole(f"model/{one.name}", one.dtype, one.shape), partial(average, one))
            for one in files[0].tensors
        ]
        aliases = {alias: name for alias, name in last.aliases.items() if fnmatchcase(alias, _MODEL)}
        foreign = ForeignState(parts, {"model": last.trees["model"]}, aliases)
        to = to if "@" in to else f"{to}@{max(one.step for one in found)}"
        run, attempt = importing.new_attempt(store, to, session.clock)
        with session.screen.progress("merging", foreign.raw_bytes) as progress:
            made = importing.write_checkpoint(run, attempt, foreign, progress)
    tags = {f"parent-{number}": f"{id} {shares[number]:.6g}" for number, id in enumerate(ids)}
    session.operator.label(made, LabelChange(tags))
    if counters:
        session.screen.note(f"from the last checkpoint, as counters have no average: {', '.join(counters)}")
    body = {"id": made.id, "parents": ids, "weights": shares, "from_last": sorted(counters)}
    session.screen.emit(body, [made.id], [f"Merged {', '.join(ids)} as {made.id}"])


def _shares(count: int, weights: str, ema: float | None) -> list[float]:
    """The share of each checkpoint; their sum is 1. Pure. Raises InvalidRequest."""
    try:
        given = [float(one) for one in weights.split(",")] if weights else [1.0] * count
    except ValueError:
        given = []
    if ema is not None and not weights:
        given = [(1 - ema if number else 1) * ema ** (count - 1 - number) for number in range(count)]
    total = fsum(given)
    if not 2 <= count == len(given) or not 0 < total < inf or (weights and ema is not None):
        raise InvalidRequest(
            f"{human.count(count, 'checkpoint')} cannot be merged so",
            "Name two or more, with --weights 1,2,1 for three of them, or --ema, or neither",
        )
    return [one / total for one in given]


def _require_alike(session: Session, ids: Sequence[str], files: Sequence[VirtualFile]) -> None:
    """Raises InvalidRequest, after a table of the tensors that are not the same in all files."""
    kinds = [{one.name: f"{list(one.shape)} {one.dtype}" for one in file.tensors} for file in files]
    names = {name: [kind.get(name, "-") for kind in kinds] for every in kinds for name in every}
    rows = [(name, *texts) for name, texts in names.items() if len(set(texts)) > 1]
    if rows:
        session.screen.preview([Table(("TENSOR", *ids), rows)])
        raise InvalidRequest(
            f"{human.count(len(rows), 'tensor')} not alike in all checkpoints, first {printable(rows[0][0])}",
            "Merge checkpoints of one model",
        )


def _store(session: Session, command: str) -> Store:
    """The store to write to. If its create-only writes overwrite, the daemon decides who commits."""
    return with_remote_create(session.store(command), os.environ.get("CKPTD_URL"), os.environ.get("CKPT_TOKEN"))
