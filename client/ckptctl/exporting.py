"""Exporting: choosing entries, fetching and checking their bytes, and writing what is whole or not there.

Entries are fetched into mapped files, so that memory does not grow with the checkpoint: the kernel writes their
pages out when it needs room.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from uuid import uuid4

from ckptctl.exits import NotWritten
from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import InvalidRequest
from ckptstore.format.documents import Content
from ckptstore.format.overlaps import Want
from ckptstore.format.planning import entry_bytes, plan_reads
from ckptstore.format.trees import leaves
from ckptstore.reading.fetch import DEFAULT_THREADS, Progress, fetch
from ckptstore.reading.source import Source
from ckptstore.stores.local import sync_folder

Entry = tuple[str, str, tuple[int, ...]]
"""Name, type and shape."""

_ALIGNMENT = 64
_THREADS = min(4, DEFAULT_THREADS)  # each holds some 40 MB


class FileFormat(StrEnum):
    """What a checkpoint can be exported to."""

    SAFETENSORS = "safetensors"
    TORCH = "torch"
    HUGGINGFACE = "huggingface"
    DCP = "dcp"

    @property
    def is_folder(self) -> bool:
        """Whether it is more than one file."""
        return self in (FileFormat.HUGGINGFACE, FileFormat.DCP)


_SUFFIXES = {".safetensors": FileFormat.SAFETENSORS, ".pt": FileFormat.TORCH}


@dataclass(frozen=True, slots=True)
class Selection:
    """What of a checkpoint is exported."""

    entries: tuple[str, ...]
    items: tuple[str, ...]
    """The trees (model, optim, ...) that something of is exported."""
    raw_bytes: int


@dataclass(frozen=True, slots=True)
class Export:
    """A part of a checkpoint, and where its bytes come from."""

    source: Source
    checkpoint: Checkpoint
    content: Content
    selection: Selection
    progress: Progress

    def entries(self) -> Iterator[Entry]:
        """The selected ones, in order."""
        table, chosen = self.content.entries, set(self.selection.entries)
        for name, dtype, shape in zip(table.name, table.dtype, table.shape, strict=True):
            if name in chosen:
                yield name, dtype, tuple(shape)

    def aliases(self) -> dict[str, str]:
        """Further names of the selected entries."""
        chosen = set(self.selection.entries)
        return {alias: name for alias, name in self.content.aliases.items() if name in chosen}

    def fetch(self, wants: Iterable[Want], buffers: Mapping[str, memoryview]) -> None:
        """Bring entries into buffers, every chunk checked. Raises Damaged, ObjectMissing or Unavailable."""
        fetch(self.source, self.checkpoint, plan_reads(self.content, wants), buffers, self.progress, _THREADS)

    @contextmanager
    def scratch(self, folder: Path) -> Iterator[dict[str, memoryview]]:
        """The bytes of each selected entry, in a file in `folder` that has no name and is gone afterwards."""
        sizes = entry_bytes(self.content)
        starts, at = {}, 0
        for name in self.selection.entries:
            starts[name] = at
            at += -(-sizes[name] // _ALIGNMENT) * _ALIGNMENT
        with tempfile.TemporaryFile(dir=folder) as file:
            view = mapped(file.fileno(), at)
            self.fetch([Want(name, None, "scratch", start) for name, start in starts.items()], {"scratch": view})
            yield {name: view[start : start + sizes[name]] for name, start in starts.items()}


def mapped(descriptor: int, size: int) -> memoryview:
    """A file, made `size` bytes long, as memory. Raises OSError if there is no room for it.

    Room is reserved first: a full disk met in the middle of a mapping would kill the process.
    """
    if not size:
        return memoryview(bytearray())
    os.posix_fallocate(descriptor, 0, size)
    return memoryview(mmap.mmap(descriptor, size))


def choose_format(path: Path, given: FileFormat | None) -> FileFormat:
    """The format given, or else the one of the suffix. Raises InvalidRequest."""
    found = given or _SUFFIXES.get(path.suffix)
    if found is None:
        raise InvalidRequest(f"the suffix of {path} tells no format", "Use .safetensors or .pt, or pass --format")
    return found


def select(checkpoint: Checkpoint, content: Content, pattern: str | None) -> Selection:
    """Entries with a matching name or alias, and the trees they belong to. Pure. Raises InvalidRequest if none match.

    A tree without tensors (a scheduler's) is matched as "scheduler/".
    """
    matching = {name for name in (*content.entries.name, *content.aliases) if _matches(name, pattern)}
    chosen = {content.aliases.get(name, name) for name in matching}
    items = tuple(
        item
        for item, tree in content.trees.items()
        if _matches(f"{item}/", pattern) or any(leaf.get("name") in chosen for _, leaf in leaves(tree, item))
    )
    if not chosen and not items:
        raise InvalidRequest(
            f"nothing in {checkpoint.id} matches {pattern!r}", f"ckptctl show {checkpoint.id} lists the names"
        )
    sizes = entry_bytes(content)
    entries = tuple(name for name in content.entries.name if name in chosen)
    return Selection(entries, items, sum(sizes[name] for name in entries))


def write_whole(path: Path, kind: FileFormat, force: bool, fill: Callable[[Path], None]) -> None:
    """Let `fill` write a temporary file or folder beside `path` and give it that name; durable on return.

    Raises InvalidRequest if `path` exists and `force` is not set, NotWritten if the file system refuses. Whatever
    goes wrong leaves `path` as it was; a killed process leaves the temporary one behind.
    """
    _check_free(path, kind, force)
    temporary = path.parent / f".{path.name}.{uuid4().hex[:8]}.tmp"
    try:
        if kind.is_folder:
            temporary.mkdir()
        else:
            temporary.touch(exist_ok=False)
        fill(temporary)
        _sync(temporary)
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
    """Of a file, or of the files in a folder."""
    files = path.iterdir() if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


def _sync(path: Path) -> None:
    for file in path.iterdir() if path.is_dir() else [path]:
        with open(file, "rb+") as opened:
            os.fsync(opened.fileno())
    if path.is_dir():
        sync_folder(path)


def _check_free(path: Path, kind: FileFormat, force: bool) -> None:
    if not path.parent.is_dir():
        raise InvalidRequest(f"the folder {path.parent} does not exist", "Make it first")
    if kind.is_folder and path.exists():
        # A folder cannot be replaced at once: for a moment there would be neither the old nor the new one.
        raise InvalidRequest(f"{path} exists", "Choose another name, or move it away first")
    if path.is_dir():
        raise InvalidRequest(f"{path} is a folder", "Name a file")
    if path.exists() and not force:
        raise InvalidRequest(f"{path} exists", "Choose another name, or pass --force to replace it")


def _matches(name: str, pattern: str | None) -> bool:
    return pattern is None or fnmatchcase(name, pattern)
