"""Exporting: selects entries, fetches and verifies their bytes, and writes files of other formats atomically.

Entries are fetched into mapped files, so that memory does not grow with the checkpoint: the kernel can write their
pages to disk. Torch is loaded for its own formats only.
"""

from __future__ import annotations

import mmap
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from uuid import uuid4

from ckptstore import human
from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import InvalidRequest, NotWritten
from ckptstore.format.boxes import Want
from ckptstore.format.documents import JSON, Content
from ckptstore.format.planning import entry_bytes, plan_reads
from ckptstore.format.trees import leaves
from ckptstore.reading.assets import ADAPTER, ASSETS, folder_files, open_weights
from ckptstore.reading.fetch import DEFAULT_THREADS, Progress, fetch
from ckptstore.reading.source import Source
from ckptstore.reading.weights import VirtualFile, Weights, cast_content
from ckptstore.stores.direct import sync
from ckptstore.stores.local import sync_folder
from ckptstore.values import Value

_ALIGNMENT = 64
_POSITION = {"kind", "epoch", "batches", "set_epoch", "start", "generators"}
"""Fields of a position in a ckpt.data.resumable loader: it means something only to such a loader."""


class FileFormat(StrEnum):
    """Export formats."""

    SAFETENSORS = "safetensors"
    TORCH = "torch"
    HUGGINGFACE = "huggingface"
    PEFT = "peft"
    DCP = "dcp"

    @property
    def is_folder(self) -> bool:
        """Whether the format has more than one file."""
        return self.is_model or self is FileFormat.DCP

    @property
    def is_model(self) -> bool:
        """Whether it is the folder of one model."""
        return self in (FileFormat.HUGGINGFACE, FileFormat.PEFT)


_SUFFIXES = {".safetensors": FileFormat.SAFETENSORS, ".pt": FileFormat.TORCH}


@dataclass(frozen=True, slots=True)
class Selection:
    """The exported part of a checkpoint."""

    entries: tuple[str, ...]
    items: tuple[str, ...]
    """The trees (model, optim, ...) of the exported entries."""
    left_out: list[str]
    """The state that each rank keeps for itself, by item, if tensors are in it and no names were given."""
    positions: list[str]
    """The same of positions in data loaders, whose tensors are states of generators."""


class Export(Value):
    """A part of a checkpoint, and the source of its bytes."""

    source: Source
    checkpoint: Checkpoint
    content: Content
    selection: Selection
    progress: Progress
    dtype: str | None = None
    """The type of what is stored as float32, in formats of safetensors."""

    def fetch(self, wants: Iterable[Want], buffers: Mapping[str, memoryview]) -> None:
        """Read entries into buffers and verify every chunk. Raises Damaged, ObjectMissing or Unavailable."""
        reads = plan_reads(cast_content(self.content, self.dtype), wants)
        # Each thread holds some 40 MB.
        fetch(self.source, self.checkpoint, reads, buffers, self.progress, min(4, DEFAULT_THREADS))

    @contextmanager
    def scratch(self, folder: Path) -> Iterator[dict[str, memoryview]]:
        """The bytes of each selected entry, in an unnamed file in `folder` that is deleted afterwards."""
        sizes = entry_bytes(self.content)
        starts, at = {}, 0
        for name in self.selection.entries:
            starts[name] = at
            at += -(-sizes[name] // _ALIGNMENT) * _ALIGNMENT
        with tempfile.TemporaryFile(dir=folder) as file:
            view = mapped(file.fileno(), at)
            self.fetch([Want(name, None, "scratch", start) for name, start in starts.items()], {"scratch": view})
            yield {name: view[start : start + sizes[name]] for name, start in starts.items()}


_ZEROS = bytes(1 << 20)


def mapped(descriptor: int, size: int) -> memoryview:
    """Map a file, extended to `size` bytes. Raises OSError if the disk is full.

    Space is reserved first, because a write to a mapping on a full disk would kill the process.
    """
    if not size:
        return memoryview(bytearray())
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:  # macOS
        for start in range(0, size, len(_ZEROS)):
            os.pwrite(descriptor, _ZEROS[: size - start], start)
    return memoryview(mmap.mmap(descriptor, size))


def choose_format(path: Path, given: FileFormat | None, dtype: str | None) -> FileFormat:
    """The requested format, or the one of the suffix. Raises InvalidRequest, also if it does not cast to `dtype`."""
    found = given or _SUFFIXES.get(path.suffix)
    if found is None:
        raise InvalidRequest(
            f"the suffix of {path} is not that of an export format", "Use .safetensors or .pt, or pass --format"
        )
    if dtype and found is not FileFormat.SAFETENSORS and not found.is_model:
        raise InvalidRequest(f"{found} keeps the types of the state", "Leave --dtype out, or export safetensors")
    return found


def select(checkpoint: Checkpoint, content: Content, pattern: str | None, local: Mapping[str, JSON]) -> Selection:
    """Entries with a matching name or alias, and the trees they belong to. Pure. Raises InvalidRequest if none match.

    A tree without tensors (a scheduler's) is matched as "scheduler/". Without a pattern everything is selected except
    assets, and state that belongs to single ranks, which has no place in a file for other programs. local: that of
    rank 0.
    """
    # Entries rank-00000/... belong to one rank alone.
    apart = re.compile(rf"rank-\d{{5,}}/|{ASSETS}/")
    chosen = {
        content.aliases.get(name, name)
        for name in (*content.entries.name, *content.aliases)
        if (not apart.match(name) if pattern is None else fnmatchcase(name, pattern))
    }
    items = tuple(
        item
        for item, tree in content.trees.items()
        if (item != ASSETS if pattern is None else fnmatchcase(f"{item}/", pattern))
        or any(leaf.get("name") in chosen for _, leaf in leaves(tree, item))
    )
    if not chosen and not items:
        problem = "holds nothing that can be exported" if pattern is None else f"has nothing that matches {pattern!r}"
        raise InvalidRequest(f"{checkpoint.id} {problem}", f"ckptctl show {checkpoint.id} lists the names")
    entries = tuple(name for name in content.entries.name if name in chosen)
    left_out, positions = list[str](), list[str]()
    for item, tree in sorted(local.items()):
        # Every rank has random state, and no other program expects it.
        if pattern is None and item != "rng" and (count := len(list(leaves(tree, item)))):
            kind = positions if isinstance(tree, dict) and tree.keys() >= _POSITION else left_out
            kind.append(f"{item} ({human.count(count, 'tensor')})")
    return Selection(entries, items, left_out, positions)


def select_named(source: Source, checkpoint: Checkpoint, content: Content, selection: Selection) -> Selection:
    """The part of a selection that has names for readers: adapters without their base, for instance.

    Raises InvalidRequest if more than one item is selected.
    """
    named = set(open_weights(source, checkpoint, _item(content, selection)).entries.values())
    return replace(selection, entries=tuple(name for name in selection.entries if name in named))


def write_whole(path: Path, kind: FileFormat, force: bool, fill: Callable[[Path], None]) -> None:
    """Let `fill` write a temporary file or folder next to `path`, then rename it; durable on return.

    Raises InvalidRequest if `path` exists and `force` is not set, NotWritten on errors of the file system. On errors
    `path` is unchanged; a killed process leaves the temporary file or folder behind.
    """
    _check_free(path, kind, force)
    temporary = path.parent / f".{path.name}.{uuid4().hex[:8]}.tmp"
    try:
        if kind.is_folder:
            temporary.mkdir()
        else:
            temporary.touch(exist_ok=False)
        fill(temporary)
        files = _files(temporary)
        for file in files:
            with open(file, "rb+") as opened:
                sync(opened.fileno())
        for folder in {file.parent for file in files} if kind.is_folder else ():
            sync_folder(folder)
        _check_free(path, kind, force)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        raise NotWritten(f"cannot write {path}: {error}", "Check the folder's free space and permissions") from error
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def size_on_disk(path: Path) -> int:
    """Size of a file, or of all files in a folder."""
    return sum(file.stat().st_size for file in _files(path))


def _files(path: Path) -> list[Path]:
    """A file, or all files in a folder."""
    return [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]


def _check_free(path: Path, kind: FileFormat, force: bool) -> None:
    if not path.parent.is_dir():
        raise InvalidRequest(f"the folder {path.parent} does not exist", "Create it first")
    if kind.is_folder and path.exists():
        # A folder cannot be replaced atomically: for a moment neither the old nor the new one would exist.
        raise InvalidRequest(f"{path} exists", "Choose another name, or move it away first")
    if path.is_dir():
        raise InvalidRequest(f"{path} is a folder", "Name a file")
    if path.exists() and not force:
        raise InvalidRequest(f"{path} exists", "Choose another name, or pass --force to replace it")


ExportWriter = Callable[[Export, Path], None]
"""Writes to a path: an existing empty file, or a folder. Not yet durable on return."""


def writer_of(kind: FileFormat, max_shard_bytes: int) -> ExportWriter:
    """The writer of a format. Raises InvalidRequest if a package that it needs is not installed."""
    if kind is FileFormat.SAFETENSORS:
        return write_safetensors
    if kind.is_model:
        return lambda export, folder: write_huggingface(export, folder, max_shard_bytes, kind is FileFormat.PEFT)
    try:
        from ckpt.foreign.writing import build_state, require_loadable, write_dcp, write_torch
    except ModuleNotFoundError as error:
        raise missing_torch(error) from error
    write = write_dcp if kind is FileFormat.DCP else write_torch

    def write_state(export: Export, path: Path) -> None:
        content, items = export.content, export.selection.items
        require_loadable(content, items)
        with export.scratch(path if kind.is_folder else path.parent) as data:
            write(build_state(content, items, data), path)

    return write_state


def missing_torch(error: ModuleNotFoundError) -> InvalidRequest:
    """The error for a format that needs torch if torch is not installed."""
    if error.name is None or error.name.partition(".")[0] != "torch":
        raise error
    return InvalidRequest(
        "this format needs the package torch, which is not installed",
        "pip install 'ckptd[torch]', or use the format safetensors",
    )


def write_safetensors(export: Export, path: Path) -> None:
    """Write all selected entries to one file, by their full names; its metadata maps aliases to them.

    Raises UnsupportedObject for an element type that safetensors does not have, and OSError.
    """
    names = {name: name for name in export.selection.entries}
    whole = Weights(cast_content(export.content, export.dtype), names, export.content.aliases)
    _fill(export, {path: whole.file(names, checkpoint=export.checkpoint.id)})


def write_huggingface(export: Export, folder: Path, max_shard_bytes: int, adapters: bool) -> None:
    """Write one item's tensors by their module's names, in files of at most `max_shard_bytes`, and an index.

    The layout is that of transformers: one file without an index if all tensors fit, and tied weights once. The
    metadata of each file maps aliases to the tensors in it. Beside them are the checkpoint's assets. Raises
    InvalidRequest if there are no adapters and they are asked for, UnsupportedObject and OSError.
    """
    chosen = set(export.selection.entries)
    whole = open_weights(export.source, export.checkpoint, _item(export.content, export.selection), export.dtype)
    wanted = {name: entry for name, entry in whole.entries.items() if entry in chosen}
    files = folder_files(replace(whole, entries=wanted), max_shard_bytes)
    if adapters and not any(Path(name).name == ADAPTER for name in files):
        raise InvalidRequest(
            f"{export.checkpoint.id} has no files of adapters",
            "Save with assets=ckpt.integrations.peft.adapter_files(model), or export safetensors",
        )
    _fill(export, {folder / name: file for name, file in files.items()})


def _fill(export: Export, files: Mapping[Path, VirtualFile]) -> None:
    """Write all files, with one fetch unless elements are in another order."""
    wants: list[Want] = []
    buffers: dict[str, memoryview] = {}
    for path, virtual in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb+") as file:
            if any(part.axes for part in virtual.parts.values()):
                file.writelines(virtual.pieces(export.source, export.checkpoint, 0, virtual.bytes))
                continue
            view = mapped(file.fileno(), virtual.bytes)
        view[: len(virtual.header)] = virtual.header
        buffers[str(path)] = view
        wants += virtual.wants(str(path))
    export.fetch(wants, buffers)


def _item(content: Content, selection: Selection) -> str:
    """The item of the selected entries. Raises InvalidRequest if there are several."""
    chosen = set(selection.entries)
    aliases = (alias for alias, name in content.aliases.items() if name in chosen)
    items = {name.partition("/")[0] for name in (*chosen, *aliases)}
    if len(items) != 1:
        raise InvalidRequest(
            f"a Hugging Face folder holds one model, but {', '.join(sorted(items)) or 'nothing'} is selected",
            "Select it with --names, for example --names 'model/*'",
        )
    return items.pop()
