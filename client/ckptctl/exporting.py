"""Exporting: choosing entries, fetching and checking their bytes, and writing a file that is whole or not there."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from uuid import uuid4

from ckptctl.exits import NotWritten
from ckptstore.catalog import Checkpoint
from ckptstore.documents import Content
from ckptstore.errors import CkptError, InvalidRequest
from ckptstore.planning import entry_bytes, plan_reads, whole_entries
from ckptstore.reading import Progress, fetch
from ckptstore.source import Source
from ckptstore.stores.local import sync_folder
from ckptstore.trees import leaves

Data = Mapping[str, bytearray]
"""Row-major bytes by entry name."""


class FileFormat(StrEnum):
    """What a checkpoint can be exported to."""

    SAFETENSORS = "safetensors"
    TORCH = "torch"


_SUFFIXES = {".safetensors": FileFormat.SAFETENSORS, ".pt": FileFormat.TORCH}


@dataclass(frozen=True, slots=True)
class Selection:
    """What of a checkpoint is exported."""

    entries: tuple[str, ...]
    items: tuple[str, ...]
    """The trees (model, optim, ...) that something of is exported."""
    raw_bytes: int


Writer = Callable[[Checkpoint, Content, Selection, Data, Path], None]


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


def fetch_entries(
    source: Source, checkpoint: Checkpoint, content: Content, selection: Selection, progress: Progress
) -> dict[str, bytearray]:
    """The bytes of the selected entries, every chunk checked. Raises Damaged, ObjectMissing or Unavailable."""
    sizes = entry_bytes(content)
    data = {name: bytearray(sizes[name]) for name in selection.entries}
    reads = plan_reads(content, whole_entries(selection.entries))
    fetch(source, checkpoint, reads, {name: memoryview(buffer) for name, buffer in data.items()}, progress)
    return data


def writer_of(kind: FileFormat) -> Writer:
    """The writer of a format. Raises InvalidRequest if what it needs is not installed."""
    return _torch_writer() if kind is FileFormat.TORCH else _safetensors_writer()


def write_whole(path: Path, force: bool, fill: Callable[[Path], None]) -> None:
    """Let `fill` write a temporary file beside `path` and give it that name; durable on return.

    Raises InvalidRequest if `path` exists and `force` is not set, NotWritten if the file system refuses. Whatever
    goes wrong leaves `path` as it was.
    """
    _check_free(path, force)
    temporary = path.parent / f".{path.name}.{uuid4().hex[:8]}.tmp"
    try:
        temporary.touch(exist_ok=False)
        mode = temporary.stat().st_mode
        fill(temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        temporary.chmod(mode)  # safetensors makes a file for its owner alone
        _check_free(path, force)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        raise NotWritten(f"cannot write {path}: {error}", "Check the folder's free space and permissions") from error
    finally:
        temporary.unlink(missing_ok=True)


def _check_free(path: Path, force: bool) -> None:
    if path.is_dir():
        raise InvalidRequest(f"{path} is a folder", "Name a file")
    if not path.parent.is_dir():
        raise InvalidRequest(f"the folder {path.parent} does not exist", "Make it first")
    if path.exists() and not force:
        raise InvalidRequest(f"{path} exists", "Choose another name, or pass --force to replace it")


def _matches(name: str, pattern: str | None) -> bool:
    return pattern is None or fnmatchcase(name, pattern)


def _safetensors_writer() -> Writer:
    try:
        from ckptctl.safetensors_file import write_safetensors
    except ModuleNotFoundError as error:
        raise _missing("safetensors", "pip install 'ckptd[export]'", error) from error
    return write_safetensors


def _torch_writer() -> Writer:
    try:
        from ckpt.export import write_torch
    except ModuleNotFoundError as error:
        raise _missing("torch", "pip install 'ckptd[torch]', or export to .safetensors", error) from error

    def write(checkpoint: Checkpoint, content: Content, selection: Selection, data: Data, path: Path) -> None:
        write_torch(content, selection.items, data, path)

    return write


def _missing(package: str, remedy: str, error: ModuleNotFoundError) -> CkptError:
    if error.name is None or error.name.partition(".")[0] != package:
        raise error
    return InvalidRequest(f"this format needs the package {package}, which is not installed", remedy)
