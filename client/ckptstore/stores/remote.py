"""Stores on any fsspec file system: memory, GCS, Azure and others. The S3 store extends this one.

Durability on return is what the service guarantees for a finished PUT or upload.
"""

from __future__ import annotations

import errno
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from typing_extensions import override

from ckptstore.codecs.chunk_codecs import Buffer
from ckptstore.stores.base import NOT_SATISFIABLE, ObjectInfo, ObjectWriter, Store, http_status, store_errors

_MIN_PART_BYTES = 32 << 20
_MAX_PARTS = 9_000  # S3 allows 10,000

# fsspec's memory file system checks and then writes, and lists a dictionary while other threads change it. A lock makes
# each operation atomic. Its objects are visible to this process only.
_MEMORY_LOCK = threading.RLock()


class FsspecStore(Store):
    """A store on an fsspec file system.

    The file system should atomically refuse `pipe_file(mode="create")` if the object exists, as AWS S3 and SeaweedFS do
    (docs/decisions/0002). A service that accepts the condition and overwrites cannot decide between two committers;
    ckptstore.stores.remote_create detects such services.
    """

    def __init__(self, fs: Any, url: str) -> None:
        self._fs = fs
        self._root = fs._strip_protocol(url).rstrip("/")
        self._read: Callable[[str], bytes] = fs.cat_file
        """A whole object, by its path."""
        self._read_range: Callable[[str, int, memoryview], int] = partial(read_range, fs)
        """See read_range."""
        self.url = url.rstrip("/")
        # The same URL is another bucket at another endpoint. The token is a hash of all options.
        self.identity = f"{self.url} {fs._fs_token}"
        library = type(fs).__module__.partition(".")[0]
        self.client = f"{library} {getattr(sys.modules[library], '__version__', '')}"
        in_memory = url.startswith("memory:")
        self._lock: AbstractContextManager[Any] = _MEMORY_LOCK if in_memory else nullcontext()
        self.shared_between_processes = not in_memory
        self.one_winner = in_memory or None

    @override
    def put(self, key: str, data: Buffer) -> None:
        with self._errors("write", key):
            self._fs.pipe_file(self._path(key), bytes(data))

    @override
    def put_if_absent(self, key: str, data: Buffer) -> bool:
        with self._errors("create", key):
            try:
                self._fs.pipe_file(self._path(key), bytes(data), mode="create")
            except OSError as error:
                # 412 and 409 arrive as FileExistsError, EINVAL or EBUSY, depending on the body of the reply.
                refused = isinstance(error, FileExistsError) or error.errno in (errno.EINVAL, errno.EBUSY)
                if refused and self._fs.exists(self._path(key)):
                    return False
                raise
            return True

    @override
    def open_writer(self, key: str, size_hint: int = 0) -> ObjectWriter:
        part_bytes = max(_MIN_PART_BYTES, -(-size_hint // _MAX_PARTS))
        with self._errors("write", key):
            file = self._fs.open(self._path(key), "wb", block_size=part_bytes, autocommit=False)
        return _FsspecWriter(file, self.object_url(key), self._lock)

    @override
    def get(self, key: str) -> bytes:
        with self._errors("read", key):
            return bytes(self._read(self._path(key)))

    @override
    def read_into(self, key: str, offset: int, buffer: memoryview) -> int:
        if not len(buffer):
            return 0
        with self._errors("read", key):
            return self._read_range(self._path(key), offset, buffer)

    @override
    def size(self, key: str) -> int:
        with self._errors("look at", key):
            return int(self._fs.size(self._path(key)))

    @override
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        with self._errors("list", prefix):
            try:
                found = self._fs.find(self._path(prefix).rpartition("/")[0], detail=True)
            except FileNotFoundError:
                return
        for path in sorted(found):
            key, info = self._key(path), found[path]
            # SeaweedFS briefly lists a folder after its last object is deleted.
            if key.startswith(prefix):
                yield ObjectInfo(key, int(info["size"]), modified_at(info))

    @override
    def list_folders(self, prefix: str) -> Iterator[str]:
        with self._errors("list", prefix):
            try:
                found = self._fs.ls(self._path(prefix).rstrip("/"), detail=True)
            except FileNotFoundError:
                return
        yield from sorted(info["name"].rstrip("/").rsplit("/", 1)[-1] for info in found if info["type"] == "directory")

    def delete_many(self, keys: Iterable[str]) -> None:
        """One DELETE per object: bulk deletes hide which key failed, and some servers reject them."""
        for key in keys:
            with self._errors("delete", key):
                try:
                    self._fs.rm_file(self._path(key))
                except FileNotFoundError:
                    pass  # deleted already

    @contextmanager
    def _errors(self, what: str, key: str) -> Iterator[None]:
        """Translate errors on an object; at the same time no other thread uses a store in memory."""
        with self._lock, store_errors(what, self.object_url(key)):
            yield

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _key(self, path: str) -> str:
        return path.removeprefix(self._root).lstrip("/")


@dataclass
class _FsspecWriter(ObjectWriter):
    file: Any
    url: str
    lock: AbstractContextManager[Any]
    bytes: int = 0

    def write(self, data: Buffer) -> None:
        with self.lock, store_errors("write", self.url):
            self.file.write(data)
        self.bytes += memoryview(data).nbytes

    def commit(self) -> None:
        with self.lock, store_errors("write", self.url):
            try:
                self.file.close()
                self.file.commit()
            except Exception:
                # The upload may be complete with its reply lost: completing it again fails on some servers.
                if not is_there(self.file.fs, self.file.path, self.bytes):
                    raise

    def abort(self) -> None:
        try:
            self.file.discard()
            # fsspec's close() would upload the buffered bytes.
            self.file.closed = True
        except Exception:
            pass  # the service's lifecycle rule removes unfinished uploads
        try:
            # The memory file system shows objects from the start, and a commit may have succeeded with its reply lost.
            with self.lock:
                self.file.fs.rm_file(self.file.path)
        except Exception:
            pass  # an object without a receipt is collected with its attempt


def read_range(fs: Any, path: str, offset: int, buffer: memoryview) -> int:
    """Fill the buffer from `offset` of an object; returns the number of bytes before its end."""
    try:
        data = fs.cat_file(path, start=offset, end=offset + len(buffer))
    except Exception as error:
        # s3fs gives 416 (the offset is past the end) as EINVAL, like any other bad request.
        bad = isinstance(error, OSError) and error.errno == errno.EINVAL
        if (bad or http_status(error) == NOT_SATISFIABLE) and fs.size(path) <= offset:
            return 0
        raise
    buffer[: len(data)] = data
    return len(data)


def is_there(fs: Any, path: str, num_bytes: int) -> bool:
    """Whether a file system has an object of this size; False if it does not answer."""
    try:
        return bool(fs.size(path) == num_bytes)
    except Exception:
        return False


def modified_at(info: dict[str, Any]) -> float:
    """When an object was written, by what a file system says of it."""
    for name in ("LastModified", "last_modified", "mtime", "updated", "created"):
        value = info.get(name)
        if isinstance(value, str):
            value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return 0.0
