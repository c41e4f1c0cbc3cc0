"""ckptd:// as a file system of fsspec: the weights and assets of checkpoints as files that are never written.

    fsspec.open("ckptd://gpt@1000/model.safetensors")

The store or daemon is that of CKPT_STORE or CKPTD_URL (with CKPT_TOKEN), or of the storage option `url`. Below
RUN@STEP, RUN@TAG or an id are the files of a Hugging Face folder; options `dtype` and `item` select a view.
"""

from __future__ import annotations

import os
import weakref
from functools import lru_cache
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
        self.source = source = open_source(url, token or os.environ.get("CKPT_TOKEN"))
        weakref.finalize(self, source.close)
        self._folder = lru_cache(1)(lambda found: folder_files(open_weights(source, found, item, dtype)))

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """The files of a checkpoint, or one of them; of a run, its checkpoints; of the root, the runs."""
        path = self._strip_protocol(path)
        if "@" in path:
            reference, inside = _split(path)
            infos = [
                {"name": f"{reference}/{name}", "size": file.bytes, "type": "file", "version": file.version}
                for name, file in self._files(reference)[1].items()
                if name == inside or not inside or name.startswith(f"{inside}/")
            ]
            if not infos:
                raise FileNotFoundError(path)
        else:
            found = [c.id for c in self.source.checkpoints(path)] if path else self.source.runs()
            infos = [{"name": name, "size": 0, "type": "directory"} for name in found]
        return infos if detail else [info["name"] for info in infos]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Size, type and version of a file. Raises FileNotFoundError."""
        path = self._strip_protocol(path)
        files = self.ls(path) if "@" in path else []
        return next((one for one in files if one["name"] == path), {"name": path, "size": 0, "type": "directory"})

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        """The bytes of a file, or of a range of it, and no others."""
        return bytes(super().cat_file(path, start, end, **{"cache_type": "none", **kwargs}))

    def _open(self, path: Any, mode: Any = "rb", *_: Any, **kwargs: Any) -> Any:
        if mode != "rb":
            raise InvalidRequest(f"{path} is part of a checkpoint, which does not change", "Open it for reading")
        reference, name = _split(path)
        checkpoint, files = self._files(reference)
        if name not in files:
            raise FileNotFoundError(f"{path}: {checkpoint.id} has {', '.join(files)}")
        return _Opened(self, path, checkpoint, files[name], **kwargs)

    def _files(self, reference: str) -> tuple[Checkpoint, dict[str, VirtualFile]]:
        """The checkpoint that is named now, and its files."""
        try:
            found = self.source.find(Reference.parse(reference))
        except NoCheckpoint as error:
            raise FileNotFoundError(str(error)) from error
        return found, self._folder(found)


class _Opened(AbstractBufferedFile):
    """A file of the checkpoint that its path named when it was opened."""

    def __init__(
        self, fs: CheckpointFiles, path: str, checkpoint: Checkpoint, file: VirtualFile, **kwargs: Any
    ) -> None:
        super().__init__(fs, path, size=file.bytes, **kwargs)
        self._opened = checkpoint, file

    def _fetch_range(self, start: int, end: int) -> bytes:
        checkpoint, file = self._opened
        into = bytearray(end - start)
        file.read(self.fs.source, checkpoint, start, memoryview(into))
        return bytes(into)


def _split(path: str) -> tuple[str, str]:
    """RUN@STEP and the rest of a path; the run may have slashes."""
    run, _, rest = path.partition("@")
    which, _, name = rest.partition("/")
    return f"{run}@{which}", name
