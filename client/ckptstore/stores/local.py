"""A folder on a local or network file system.

A write is durable after the file is fsynced, then renamed or linked, and its folder is fsynced. fsspec's local file
system does none of these.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from ckptstore.clock import system_clock
from ckptstore.codecs import fused
from ckptstore.codecs.chunk_codecs import Buffer
from ckptstore.errors import StoreUnavailable, StoreUnsafe
from ckptstore.names import new_ulid
from ckptstore.stores.base import (
    PARALLEL_READS,
    ObjectInfo,
    ObjectReader,
    ObjectWriter,
    Store,
    check_length,
    store_errors,
)
from ckptstore.stores.direct import DirectFile, DirectReads, read_direct, sync

_TEMPORARY = ".tmp-"
_FSTAB = Path("/etc/fstab")
_STALE_TEMPORARY_S = 24 * 3600
_CREATE_TRIES = 20
_MAX_PARTS = 1024
"""Most buffers of one preadv call (IOV_MAX on Linux)."""

_ONE_HOST = frozenset((
    "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "fuse.fuse-overlayfs", "fuseblk", "overlay", "tmpfs", "xfs",
    "zfs",
))  # fmt: skip
"""File systems that only one host mounts."""
_LINKED_ONCE = _ONE_HOST | {
    "beegfs", "ceph", "fuse.glusterfs", "fuse.juicefs", "gpfs", "lustre", "nfs", "nfs4", "wekafs",
}  # fmt: skip
"""Those that give a name to one of several hard links, whichever hosts make them."""
_EMULATED = frozenset({"fuse.seaweedfs"})
"""Those whose mounts emulate hard links, each for itself."""
_CACHED = ("cifs", "fuse", "nfs", "smb")
"""Those whose hosts keep folders and attributes for a while: names begin so."""
_LISTING_LAG_S = 120.0
"""Twice what NFS keeps them by default (acdirmax)."""
_NO_LINKS = frozenset((errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM))
_MOUNTS = Path("/proc/self/mountinfo")
_durable: set[Path] = set()
"""Folders whose names this process knows to be durable."""
_MAX_DURABLE = 4096


class LocalStore(Store):
    """A store in a folder, which the first write creates.

    A folder that vanishes later is not created again: an unmounted volume is not an empty store.
    """

    create_only = "a hard link"
    parallel_reads = max(4, PARALLEL_READS)  # past the page cache, each has one read under way

    def __init__(self, root: str) -> None:
        self.root = Path(os.path.abspath(os.path.expanduser(root)))
        self.kind = kind = _file_system(self.root)
        """The type of the file system; empty if it is unknown."""
        self._one_host = kind in _ONE_HOST
        self.one_winner = kind in _LINKED_ONCE or (False if kind in _EMULATED else None)
        self.listing_lag_s = _LISTING_LAG_S if kind.startswith(_CACHED) and kind not in _ONE_HOST else 0.0
        # Not Path.as_uri, which quotes: open_store(store.url) must open the same folder.
        self.url = self.identity = f"file://{self.root}"
        self._skipped = len(os.path.join(self.root, ""))
        """Length of the path before the key."""
        self.must_exist = self.root.is_dir()
        self._mounted = False
        self._new = not self.must_exist
        """The root may not be durable yet: this process creates it, or another one does at the same time."""

    @property
    def on_this_host(self) -> bool:
        """Whether the folder is on a file system for one host. An unknown file system counts as one of a network."""
        return self.root.is_dir() and _file_system(self.root) in _ONE_HOST

    def put(self, key: str, data: Buffer) -> None:
        """Write to a temporary file in the same folder, then rename."""
        path = self.root / key
        with self._errors("write", key), self._temporary(path, data) as temporary:
            os.replace(temporary, path)

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        """Write to a temporary file in the same folder, then link: link fails if the name exists."""
        path = self.root / key
        with self._errors("create", key):
            if self.one_winner and path.exists():  # elsewhere the link is asked, which a probe must see
                with suppress(FileNotFoundError):  # it was deleted meanwhile
                    sync_folder(path.parent)  # the call that created it may have failed to
                return False
            with self._temporary(path, data) as temporary:
                try:
                    os.link(temporary, path)
                except FileExistsError:
                    return False
                except OSError as error:
                    if error.errno not in _NO_LINKS:
                        raise
                    raise StoreUnsafe(
                        f"cannot create {path}: its file system ({_file_system(self.root)}) refuses hard links, and so "
                        "two processes could both win a decision",
                        "Use a disk, NFS, or the URL of the service behind the mount (s3://, gs://)",
                    ) from error
            return True

    def open_writer(self, key: str, size_hint: int = 0) -> ObjectWriter:
        """Write in place: the name is unique to an attempt and has no meaning before its receipt."""
        path = self.root / key
        with self._errors("write", key):
            return _LocalWriter(path, DirectFile(self._create(path), size_hint), self.object_url(key))

    def open_replacement(self, key: str, size_hint: int = 0) -> ObjectWriter:
        """Write to a temporary file in the same folder, then rename."""
        path = self.root / key
        with self._errors("write", key):
            temporary = _temporary_name(path)
            file = DirectFile(self._create(temporary), size_hint)
            return _LocalWriter(temporary, file, self.object_url(key), replaces=path)

    @override
    def get(self, key: str) -> bytes:
        with self._errors("read", key):
            return (self.root / key).read_bytes()

    @override
    def read_into(self, key: str, offset: int, buffer: memoryview) -> int:
        with self._errors("read", key):
            fd = os.open(self.root / key, os.O_RDONLY)
            try:
                return _read_at(fd, offset, buffer)
            finally:
                os.close(fd)

    def open_reader(self, key: str) -> ObjectReader:
        """Read through the page cache, where the kernel reads ahead of each sequential reader; or past it what is read
        once, if no other host mounts the file system."""
        with self._errors("read", key):
            fd = os.open(self.root / key, os.O_RDONLY)
            return _LocalReader(fd, self.object_url(key), DirectReads(fd) if self._one_host else None)

    @override
    def size(self, key: str) -> int:
        with self._errors("look at", key):
            return (self.root / key).stat().st_size

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Walk the folder; temporary files are not objects."""
        with self._errors("list", prefix):
            folder, _, begin = prefix.rpartition("/")
            yield from sorted(self._walk(self.root / folder, begin), key=lambda info: info.key)

    def list_folders(self, prefix: str) -> Iterator[str]:
        """The folders directly below that contain more than the temporary files of a killed process."""
        with self._errors("list", prefix):
            try:
                folders = sorted(entry.name for entry in os.scandir(self.root / prefix) if entry.is_dir())
            except FileNotFoundError:
                self._check_root()
                return
            for name in folders:
                try:
                    if next(self._walk(self.root / (prefix + name)), None) is None:
                        continue
                except PermissionError:
                    pass  # e.g. lost+found; the caller checks names
                yield name

    def delete_many(self, keys: Iterable[str]) -> None:
        """Unlink the files, then remove folders that became empty, to keep listings short."""
        folders = set()
        for key in keys:
            path = self.root / key
            with self._errors("delete", key):
                try:
                    path.unlink()
                except FileNotFoundError:
                    self._check_root()
            folders.add(path.parent)
        for folder in folders:
            with suppress(OSError):  # not empty, or removed already
                if folder != self.root and next(self._walk(folder), None) is None:
                    folder.rmdir()

    @contextmanager
    def _errors(self, what: str, key: str) -> Iterator[None]:
        """Translate errors on an object. Raises StoreUnavailable if it is missing because the root has vanished."""
        with store_errors(what, self.object_url(key)):
            try:
                yield
            except FileNotFoundError:
                self._check_root()
                raise

    def _check_root(self) -> None:
        """Raises StoreUnavailable if the root does not exist, and existed before or must exist."""
        must_exist = self.must_exist  # first: another thread may be creating the root
        if self.root.is_dir():
            self.must_exist = True
        elif must_exist:
            raise StoreUnavailable(
                f"there is no folder {self.root}",
                "Check the path, and that its volume is mounted. The first save creates a new folder, but not one that "
                "was there before",
            )

    def _create(self, path: Path) -> int:
        """The descriptor of a new file. Creates its folders, and the root if it never existed."""
        self._check_root()
        if not self._mounted:
            _check_mounted(self.root)
            self._mounted = True
        if self._new:
            make_folders(self.root.parent)
            make_folders(self.root, self.root.parent)
            self.must_exist, self._new = True, False
        for _ in range(_CREATE_TRIES):  # another process may remove the empty folder at the same time
            try:
                make_folders(path.parent, self.root)
                return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            except FileNotFoundError:
                continue
        raise FileNotFoundError(path)

    @contextmanager
    def _temporary(self, path: Path, data: Buffer) -> Iterator[Path]:
        """A durable temporary file next to `path`. Exit removes its name and fsyncs the folder."""
        temporary = _temporary_name(path)
        fd = self._create(temporary)
        try:
            with open(fd, "wb") as file:
                file.write(data)
                file.flush()
                sync(fd)
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)
            with suppress(FileNotFoundError):  # the object and its folder were deleted meanwhile
                sync_folder(path.parent)

    def _walk(self, folder: Path, begin: str = "") -> Iterator[ObjectInfo]:
        """The objects below a folder, in files and folders of names that begin so. Removes old temporary files of
        killed processes."""
        seen: set[str] = set()
        replaced = True
        while replaced:  # what was deleted after the names were read may have a successor, which they lack
            replaced = False
            try:
                entries = list(os.scandir(folder))
            except FileNotFoundError:
                self._check_root()
                return
            except NotADirectoryError:
                return
            for entry in entries:
                if entry.name in seen or not entry.name.startswith(begin):
                    continue
                seen.add(entry.name)
                temporary = entry.name.startswith(_TEMPORARY)
                try:
                    if entry.is_dir(follow_symlinks=False):
                        yield from self._walk(Path(entry.path))
                        continue
                    status = entry.stat()
                except FileNotFoundError:
                    replaced |= not temporary
                    continue
                if temporary:
                    _remove_stale(Path(entry.path), status)
                elif stat.S_ISREG(status.st_mode):
                    yield ObjectInfo(entry.path[self._skipped :], status.st_size, status.st_mtime)


@dataclass
class _LocalReader(ObjectReader):
    small_reads = True
    _past = False

    fd: int
    url: str
    direct: DirectReads | None

    def expect(self, offset: int, num_bytes: int, again: bool = True) -> None:
        """Bytes that are not read again go past the page cache where that pays."""
        self._past = not again and self.direct is not None and self.direct.expect(offset, num_bytes)

    def read(self, offset: int, buffer: memoryview) -> None:
        try:
            count = self.direct.read(offset, buffer) if self._past and self.direct is not None else 0
            count += _read_at(self.fd, offset + count, buffer[count:])
        except OSError:
            with store_errors("read", self.url):
                raise
        check_length(self.url, offset, count, len(buffer))

    def read_hashed(self, offset: int, buffer: memoryview) -> str:
        found = None
        if not self._past:
            with store_errors("read", self.url):
                found = fused.read(self.fd, offset, buffer)
        if found is None:
            return super().read_hashed(offset, buffer)
        check_length(self.url, offset, found[0], len(buffer))
        return found[1]

    def read_parts(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """One system call for all buffers, unless it returns less."""
        if not self._past and len(buffers) <= _MAX_PARTS:
            with suppress(OSError):
                if os.preadv(self.fd, buffers, offset) == sum(map(len, buffers)):
                    return
        super().read_parts(offset, buffers)

    def read_once(self, offset: int, num_bytes: int) -> memoryview:
        """Direct I/O, into memory from which `open_writer` can write to another folder with direct I/O."""
        with store_errors("read", self.url):
            data = read_direct(self.fd, offset, num_bytes)
        check_length(self.url, offset, len(data), num_bytes)
        return data

    def close(self) -> None:
        os.close(self.fd)


@dataclass
class _LocalWriter(ObjectWriter):
    path: Path
    file: DirectFile
    url: str
    replaces: Path | None = None
    """The final name, if `path` is a temporary one."""

    def write(self, data: Buffer) -> None:
        with store_errors("write", self.url):
            self.file.write(data)

    def commit(self) -> None:
        with store_errors("write", self.url):
            self.file.finish()
            if self.replaces is not None:
                os.replace(self.path, self.replaces)
            sync_folder(self.path.parent)

    def abort(self) -> None:
        try:
            self.file.close()
            self.path.unlink(missing_ok=True)
            self.path.parent.rmdir()
        except OSError:
            pass  # the folder has other shards, or the file is left as an orphan without a receipt, to be collected


def _check_mounted(root: Path) -> None:
    """Raises StoreUnavailable if /etc/fstab lists a volume around the root that is not mounted now."""
    try:
        fields = [line.split() for line in _FSTAB.read_text().splitlines() if not line.lstrip().startswith("#")]
        mounted = {line.split()[4] for line in _MOUNTS.read_text().splitlines()}
    except OSError:
        return
    for place in (Path(found[1]) for found in fields if len(found) > 1 and found[1].startswith("/")):
        if root.is_relative_to(place) and str(place) not in mounted and not place.is_mount():
            raise StoreUnavailable(
                f"{place}, where {root} is, is listed in {_FSTAB} and is not mounted",
                "Mount it: nothing is written below its mount point",
            )


def _temporary_name(path: Path) -> Path:
    return path.parent / f"{_TEMPORARY}{new_ulid(system_clock())}"


def make_folders(folder: Path, root: Path | None = None) -> None:
    """Create `folder` and its parents, each durable before the next. root: the topmost one, which is not created.

    Below a root, folders that exist are made durable as well, once per process: those who created them may not have
    done so yet.
    """
    there = folder.is_dir()
    if folder == root or (there and (root is None or folder in _durable)):
        return
    make_folders(folder.parent, root)
    if not there:
        with suppress(FileExistsError):  # created by another process (exist_ok=True fails if it is gone again)
            folder.mkdir()
    try:
        sync_folder(folder.parent)
    except PermissionError:
        if not there:
            raise  # otherwise it is left to those who own the parent
    if len(_durable) >= _MAX_DURABLE:
        _durable.clear()
    _durable.add(folder)


def _file_system(folder: Path) -> str:
    """The type of the file system of a folder, by its mount point; empty if it is unknown."""
    try:
        mounts = _MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    path, longest, kind = os.path.realpath(folder) + "/", "", ""
    for line in mounts:
        place = line.split()[4].replace(r"\040", " ").rstrip("/") + "/"
        if path.startswith(place) and len(place) >= len(longest):
            longest, kind = place, line.partition(" - ")[2].split()[0]
    return kind


def sync_folder(folder: Path) -> None:
    """Make the directory entries of a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync(fd)
    finally:
        os.close(fd)


def _read_at(fd: int, offset: int, buffer: memoryview) -> int:
    """Fill the buffer up to the end of the file; returns the number of bytes."""
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def _remove_stale(path: Path, status: os.stat_result) -> None:
    # Left by a killed process: a temporary file in use is seconds old.
    if system_clock() - status.st_mtime > _STALE_TEMPORARY_S:
        with suppress(OSError):  # removed meanwhile, or the folder contains objects
            path.unlink()
            path.parent.rmdir()
