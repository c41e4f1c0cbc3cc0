"""The files of the cache: one per extent, its bytes and then their checksum. One process at a time.

Nothing is fsynced: what a crash tears fails its checksum, and is read from the store again.
"""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path

import xxhash

from ckptd.cache.extents import Extent
from ckptstore.clock import system_clock
from ckptstore.codecs.chunk_codecs import Buffer
from ckptstore.names import new_ulid

_LOG = logging.getLogger(__name__)
_DIGEST_BYTES = 16
_TEMPORARY = ".tmp-"


class Folder:
    """A folder that this process locks until `close`. Any thread may use it.

    Raises OSError if it cannot be used, BlockingIOError if another process uses it.
    """

    def __init__(self, path: Path, store_url: str) -> None:
        self._files = path / "extents"
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._files.mkdir(exist_ok=True, mode=0o700)
        self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The lock file has the store's URL. Files of another store are deleted before it is rewritten.
            signature = store_url.encode()
            ours = os.pread(self._lock, len(signature) + 1, 0) == signature
            self.found = self._scan(ours)
            """The extents found in the folder, oldest first."""
            if not ours:
                os.ftruncate(self._lock, 0)
                os.pwrite(self._lock, signature, 0)
        except BaseException:
            os.close(self._lock)
            raise

    def close(self) -> None:
        """Release the folder for another process."""
        os.close(self._lock)

    def write(self, extent: Extent, data: Buffer) -> None:
        """Keep an extent. Raises OSError, and then leaves nothing behind."""
        temporary = self._files / f"{_TEMPORARY}{new_ulid(system_clock())}"
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.write(_digest(extent, data))
            temporary.rename(self._path(extent))
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def read(self, extent: Extent) -> memoryview | None:
        """The bytes of an extent, verified; None if they are missing or damaged."""
        size = extent.bytes + _DIGEST_BYTES
        try:
            with self._path(extent).open("rb", buffering=0) as file:
                stored = file.read(size)
        except FileNotFoundError:
            return None
        except OSError as error:
            _LOG.warning("cannot read the cache: %s", error)
            return None
        data = memoryview(stored)[: extent.bytes]
        if len(stored) != size or _digest(extent, data) != stored[extent.bytes :]:
            _LOG.warning("%s of the cache is damaged and is read from the store again", self._path(extent))
            return None
        return data

    def remove(self, extent: Extent) -> None:
        """Delete an extent. If that fails, the file stays unused until a restart."""
        try:
            self._path(extent).unlink(missing_ok=True)
        except OSError as error:
            _LOG.warning("cannot delete from the cache: %s", error)

    def _path(self, extent: Extent) -> Path:
        return self._files / extent.file_name

    def _scan(self, ours: bool) -> list[Extent]:
        """List the extents, and delete files that a crash left; all files if they belong to another store."""
        found = []
        with os.scandir(self._files) as entries:
            for entry in entries:
                extent, status = Extent.parse(entry.name), entry.stat(follow_symlinks=False)
                if ours and extent and status.st_size == extent.bytes + _DIGEST_BYTES:
                    found.append((status.st_mtime_ns, extent))
                elif not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
        return [extent for _, extent in sorted(found)]


def open_folder(path: Path, store_url: str) -> Folder | None:
    """The folder, or None if it cannot be used: the reason is logged, and the daemon runs without a cache."""
    try:
        return Folder(path, store_url)
    except BlockingIOError:
        _LOG.warning("nothing is cached: another daemon uses %s", path)
    except OSError as error:
        _LOG.warning("nothing is cached: %s", error)
    return None


def _digest(extent: Extent, data: Buffer) -> bytes:
    # Includes the name, so that a renamed file fails its checksum.
    hashed = xxhash.xxh3_128(extent.file_name.encode())
    hashed.update(data)
    return hashed.digest()
