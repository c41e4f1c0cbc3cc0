"""SaverLock: file locks that show whether the saver of a killed trainer is still uploading on this host.

A trainer that is restarted right after a SIGKILL must not resume from an older step than the one its predecessor's
saver is about to commit. There are two lock files per run: the trainer holds a shared lock on one, its saver on the
other until its uploads are done. The kernel releases a lock when its process ends, in any way. If only the saver's
lock is held, an orphaned saver is finishing its jobs. A process that tests these locks holds a third one meanwhile.

The files are in the temporary directory, and must stay there while they are locked. systemd-tmpfiles keeps a locked
folder, and other programs that clean up go by age: both processes lock the folder, and the saver touches the files at
each save.

A note beside the locks remembers that the run had a checkpoint: a store that has nothing of it later is not mounted.
A second note names the newest checkpoint of the local tier. Files that were not used for 90 days are removed.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import xxhash

from ckpt.host.segment import close_after_fork, no_fork
from ckptstore.clock import system_clock
from ckptstore.errors import CkptError, InvalidRequest, Unavailable
from ckptstore.retry import pauses

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
_OLD_S = 90 * 24 * 3600.0
KNOWN, LOCAL = "known", "local"
"""The notes about the checkpoints of a run."""
_TESTS_S = 1.0
"""How long tests of other processes may take, at most."""
_VARIABLES = ("TMPDIR", "TEMP", "TMP")
_FOLDERS = ("/tmp", "/var/tmp", "/usr/tmp")


class SaverLock:
    """The locks of one trainer and its saver. Acquired before the saver starts."""

    def __init__(self, store: str, run: str) -> None:
        """Raises InvalidRequest if the folder of lock files is not this user's alone, or Unavailable if it is full."""
        self._trainer = self._folder = -1
        self.saver = -1
        """The descriptor that the saver inherits."""
        with no_fork:
            close_after_fork(self, SaverLock.close)
            try:
                self._trainer = _hold(host_path(store, run, "trainer"))
                self.saver = _hold(host_path(store, run, "saver"))
                self._folder = hold_folder()
            except BaseException:
                self.close()
                raise

    def inherited(self) -> None:
        """Close this process's copy of the saver's descriptor; the saver has inherited it."""
        fd, self.saver = self.saver, -1
        os.close(fd)

    def close(self) -> None:
        """Close the descriptors: the trainer's lock is released. In a forked child, close its copies of them."""
        held = self._trainer, self.saver, self._folder
        self._trainer = self.saver = self._folder = -1
        for fd in held:
            if fd >= 0:
                os.close(fd)


def wait_for_orphans(store: str, run: str, timeout_s: float) -> bool:
    """Wait while an orphaned saver of this run is uploading on this host; False if it still is after `timeout_s`.

    Raises as SaverLock does.
    """
    deadline, waits = time.monotonic() + timeout_s, pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
    while (orphaned := _is_orphaned(store, run)) is not False:
        if time.monotonic() > deadline + (0.0 if orphaned else _TESTS_S):
            return False
        time.sleep(next(waits))
    return True


def _is_orphaned(store: str, run: str) -> bool | None:
    """None while another process is testing: a test briefly holds the locks, so two ranks testing at once would each
    take the other for a live trainer."""
    with try_lock(store, run, "testing") as alone:
        if not alone:
            return None
        return _is_held(host_path(store, run, "saver")) and not _is_held(host_path(store, run, "trainer"))


def touch_locks(store: str, run: str) -> None:
    """Keep the lock files from programs that delete old files; the saver calls it for each save. Never raises."""
    with suppress(CkptError, OSError):
        for role in ("trainer", "saver"):
            os.utime(host_path(store, run, role))


def note_checkpoint(store: str, run: str, local: str = "") -> None:
    """Remember on this host that the run has a checkpoint. Never raises: without the note nothing is missed.

    local: the newest one in the local tier, and that store.
    """
    try:
        path = host_path(store, run, LOCAL if local else KNOWN)
        new = path.with_name(f"{path.name}.{os.getpid()}")
        new.write_text(f"{local or f'{store} {run}'}\n")
        new.replace(path)
    except (CkptError, OSError) as error:
        logger.warning("cannot note that run %r has a checkpoint: %s", run, error)


def noted_checkpoint(store: str, run: str, note: str = KNOWN) -> Path | None:
    """The note that the run had a checkpoint, if there is one. Raises InvalidRequest as SaverLock does."""
    path = host_path(store, run, note)
    return path if path.exists() else None


def sweep_folder() -> None:
    """Remove the files in this user's folder that were not used for _OLD_S, and that no process has locked.

    These are locks and notes. Never raises.
    """
    with suppress(CkptError, OSError):
        for path in host_folder().rglob("*"):
            with suppress(CkptError, OSError):
                if not path.is_file() or system_clock() - path.lstat().st_mtime < _OLD_S:
                    continue
                with locked(path) as free:
                    if free:
                        path.unlink()


def try_lock(store: str, run: str, role: str) -> AbstractContextManager[bool]:
    """Hold a lock of this host in the block; False if another thread or process holds it. Raises InvalidRequest."""
    return locked(host_path(store, run, role))


def hold_folder() -> int:
    """The descriptor of a lock that keeps systemd-tmpfiles out of this user's folder. Raises as SaverLock does."""
    return _hold(host_folder(), os.O_RDONLY | os.O_DIRECTORY)


def _hold(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    while True:
        with _explained(path):
            fd = os.open(path, flags, 0o600)
        try:
            with _explained(path):
                fcntl.flock(fd, fcntl.LOCK_SH)
            os.utime(fd)
            if os.fstat(fd).st_nlink:
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # it was deleted before it was locked


def _is_held(path: Path) -> bool:
    with locked(path) as is_free:
        return not is_free


@contextmanager
def locked(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> Iterator[bool]:
    """Hold the lock of a file in the block; False if another thread or process holds it. Raises Unavailable."""
    with _explained(path):
        fd = os.open(path, flags, 0o600)
    try:
        try:
            with _explained(path):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            try:
                yield True
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)  # a child that was forked meanwhile has a copy of the descriptor
    finally:
        os.close(fd)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Raises Unavailable for errors of a file other than that it is locked."""
    try:
        yield
    except BlockingIOError:
        raise
    except OSError as error:  # some file systems of a network have no locks
        raise Unavailable(
            f"cannot open or lock {path}, which shows whether an earlier saver still uploads: {error.strerror}",
            "Free space in that file system, or set TMPDIR to a folder of a local disk for all processes of the run",
        ) from error


def host_path(store: str, run: str, role: str) -> Path:
    """A file of one run in this host's folder. role: the end of its name. Raises InvalidRequest as SaverLock does.

    All spellings of a store have the same files: with and without symbolic links, and slashes at the end. Locks and
    sockets belong to this host until it is restarted: hosts may share the folder.
    """
    scheme, separator, path = store.rstrip("/").partition("://")
    store = f"{scheme}{separator}{os.path.realpath(path) if scheme == 'file' else path}"
    boot = "" if role in (KNOWN, LOCAL) else _boot()
    return host_folder() / f"{xxhash.xxh3_64_hexdigest(f'{store} {run}{boot}'.encode())}.{role}"


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return ""


def host_folder() -> Path:
    """This user's folder for locks and notes, in the temporary directory.

    Raises InvalidRequest if another user can reach into it. That user could hold the locks, and saves would wait for
    them without end. Raises Unavailable if it cannot be made.
    """
    folder = temporary_folder(os.environ) / f"ckpt-{os.getuid()}"
    with _explained(folder), suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    mode = stat.S_IMODE(found.st_mode)
    for problem, applies in (
        ("is not a folder", not stat.S_ISDIR(found.st_mode)),
        (f"belongs to user {found.st_uid}", found.st_uid != os.getuid()),
        (f"has mode {mode:04o}, so that other users can reach into it", mode & 0o077),
    ):
        if applies:
            raise InvalidRequest(
                f"the folder of lock files {folder} {problem}",
                "Remove it, or chmod 700 it if it is yours, or set TMPDIR to a folder that only you can write to",
            )
    return folder


def temporary_folder(environment: Mapping[str, str]) -> Path:
    """The temporary directory of processes with this environment.

    It is tempfile's, but for the test whether a file can be written. That test fails where the disk is full, and then
    the next trainer would look for the locks elsewhere.
    """
    wanted = [*(environment.get(name, "") for name in _VARIABLES), *_FOLDERS, os.curdir]
    usable = (folder for folder in wanted if folder and os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK))
    return Path(os.path.abspath(next(usable, os.curdir)))
