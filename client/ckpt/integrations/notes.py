"""Small files that name a checkpoint, at paths where a framework expects the checkpoint itself."""

from __future__ import annotations

import json

import fsspec

MAX_BYTES = 4096


def write_note(path: str, checkpoint: str) -> None:
    """Write a file that names this checkpoint, on any file system of fsspec; folders above it are made."""
    with fsspec.open(path, "w", auto_mkdir=True) as file:  # type: ignore[no-untyped-call]
        json.dump({"ckptd": checkpoint}, file)


def noted(path: str) -> str | None:
    """The checkpoint that the file at this path names; None for another file, or none."""
    try:
        with fsspec.open(path, "rb") as file:  # type: ignore[no-untyped-call]
            head = file.read(MAX_BYTES)
        return str(json.loads(head)["ckptd"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def noted_beside(path: str) -> set[str]:
    """The checkpoints that other files in the same folder name."""
    files, own = fsspec.core.url_to_fs(path)  # type: ignore[no-untyped-call]
    folder = files._parent(own)
    small = [one["name"] for one in files.ls(folder, detail=True) if (one["size"] or 0) <= MAX_BYTES]
    found = (noted(files.unstrip_protocol(name)) for name in small if name != own)
    return {name for name in found if name is not None}
