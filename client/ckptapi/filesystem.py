"""ckptd:// as a file system of fsspec: the weights and assets of checkpoints as files that are never written.

    fsspec.open("ckptd://gpt@1000/model.safetensors")

The store or daemon is that of CKPT_STORE or CKPTD_URL (with CKPT_TOKEN), or of the storage option `url`. Below
RUN@STEP, RUN@TAG or an id are the files of a Hugging Face folder; options `dtype` and `item` select a view.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from ckptapi.opening import open_source
from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import InvalidRequest, NoCheckpoint
from ckptstore.names import Reference
from ckptstore.reading.assets import folder_files, open_weights
from ckptstore.reading.weights import VirtualFile


class CheckpointFiles(AbstractFileSystem):
    """Read-only. Every byte that is returned was verified: a damaged chunk raises CorruptObject. For any thread."""

    protocol = "ckptd"

    def __init__(
        self, url: str | None = None, token: str | None = None, item: str = "model", dtype: str | None = None, **_: Any
    ) -> None:
        super().__init__()
        url = url or os.environ.get("CKPT_STORE") or os.environ.get("CKPTD_URL")
        if url is None:
            raise InvalidRequest("no store or daemon is named", "Set CKPT_STORE or CKPTD_URL, or pass url=")
        self.source = open_source(url, token or os.environ.get("CKPT_TOKEN"))
        weakref.finalize(self, self.source.close)
        self._view = item, dtype
        self._last: dict[str, dict[str, VirtualFile]] = {}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """The files of a checkpoint; of the root, the runs."""
        path = self._strip_protocol(path).strip("/")
        if "@" not in path:
            found = [c.id for c in self.source.checkpoints(path)] if path else self.source.runs()
            infos = [{"name": name, "size": 0, "type": "directory"} for name in found]
        else:
            reference, inside = _split(path)
            infos = [
                {"name": f"{reference}/{name}", "size": file.bytes, "type": "file", "version": file.version}
                for name, file in self._files(path)[1].items()
                if name == inside or not inside or name.startswith(f"{inside}/")
            ]
        return infos if detail else [info["name"] for info in infos]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Size, type and version of a file. Raises FileNotFoundError."""
        path = self._strip_protocol(path).strip("/")
        name = _split(path)[1] if "@" in path else ""
        if not name:
            return {"name": path, "size": 0, "type": "directory"}
        file = self._file(path)[1]
        return {"name": path, "size": file.bytes, "type": "file", "version": file.version}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """The bytes of a file, or of a range of it."""
        opened = self._file(self._strip_protocol(path).strip("/"))
        return self.range(opened, *slice(start, end).indices(opened[1].bytes)[:2])

    def range(self, opened: tuple[Checkpoint, VirtualFile], start: int, stop: int) -> bytes:
        """The bytes of a range of a file that was found before, whatever its reference names now."""
        into = bytearray(max(0, stop - start))
        opened[1].read(self.source, opened[0], start, memoryview(into))
        return bytes(into)

    def _open(self, path: Any, mode: Any = "rb", *_: Any, **kwargs: Any) -> Any:
        if mode != "rb":
            raise InvalidRequest(f"{path} is part of a checkpoint, which does not change", "Open it for reading")
        opened = self._file(self._strip_protocol(path).strip("/"))
        return _Opened(self, path, opened, size=opened[1].bytes, **kwargs)

    def _file(self, path: str) -> tuple[Checkpoint, VirtualFile]:
        checkpoint, files = self._files(path)
        name = _split(path)[1]
        if name not in files:
            raise FileNotFoundError(f"{path}: {checkpoint.id} has {', '.join(files)}")
        return checkpoint, files[name]

    def _files(self, path: str) -> tuple[Checkpoint, dict[str, VirtualFile]]:
        """The checkpoint that a path names now, and its files."""
        try:
            found = self.source.find(Reference.parse(_split(path)[0]))
        except NoCheckpoint as error:
            raise FileNotFoundError(str(error)) from error
        files = self._last.get(found.manifest_digest)
        if files is None:
            files = folder_files(open_weights(self.source, found, *self._view))
            self._last = {found.manifest_digest: files}
        return found, files


class _Opened(AbstractBufferedFile):
    def __init__(self, fs: CheckpointFiles, path: str, opened: tuple[Checkpoint, VirtualFile], **kwargs: Any) -> None:
        super().__init__(fs, path, **kwargs)
        self._held = opened

    def _fetch_range(self, start: int, end: int) -> bytes:
        return bytes(self.fs.range(self._held, start, end))


def _split(path: str) -> tuple[str, str]:
    """RUN@STEP and the rest of a path; the run may have slashes."""
    run, _, rest = path.partition("@")
    which, _, name = rest.partition("/")
    return f"{run}@{which}", name
