"""The saver's memory: the newest committed snapshot, for a trainer that restarts on this host.

While a trainer lives, this is bookkeeping only: which slot of the arena holds which attempt, with the digests of its
chunks. When the trainer has died, the saver keeps the slots of the newest committed attempt, and of newer ones whose
commit is pending. It frees all others, and gives descriptors to trainers of this run that ask for the attempt that they
restore. The store decides which attempt that is, and its manifest which bytes are right: the answer names the digest of
each chunk's stored bytes, and that of the bytes before encoding, taken before they were encoded.

Trainers connect to a Unix socket in a folder below that of the locks, which only this user can reach. Each end checks
the other's user.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import msgspec

from ckpt.host.lock import host_path
from ckpt.host.memory import available_bytes
from ckpt.host.segment import Segment
from ckpt.saver.messages import Channel, Message, SaveJob, Setup
from ckptstore.clock import system_clock
from ckptstore.errors import CkptError
from ckptstore.format.documents import Shard
from ckptstore.format.shards import ChunkSpan
from ckptstore.names import Attempt, new_ulid
from ckptstore.threads import start_daemon

logger = logging.getLogger(__name__)

RETAIN_SNAPSHOT_S = 120.0
"""By default, how long the memory is kept."""
_NEW = ".new"
"""End of a socket's name until it listens: one that refuses counts as left behind."""
_TIMEOUT_S = 10.0
"""Limit on one exchange of messages; a peer that is stopped must not hold up a restore."""
_LOOK_S = 0.2
_RESERVE = 8
"""The memory is freed when less than 1/N of it is still available on the host."""
_CREDENTIALS = struct.Struct("3i")


class Attach(Message):
    """A trainer restores this attempt."""

    store: str
    run: str
    attempt: str


class Release(Message):
    """The trainer of this rank is about to allocate its own slots: free the memory."""

    store: str
    run: str
    rank: int


class HeldSnapshot(Message):
    """A snapshot in shared memory; its descriptor comes with the message. Its receipt is durable. Columns by chunk."""

    attempt: str
    shards: dict[str, int]
    """The number of the first chunk of each shard."""
    num_bytes: int
    """Size of the segment."""
    at: list[int]
    """Offset in the segment."""
    raw: list[int]
    """Bytes before encoding."""
    digests: bytes
    """Digests of the stored bytes, 16 bytes per chunk, as in the manifest."""
    raw_digests: bytes
    """Digests of the bytes before encoding."""


class Refused(Message):
    """There is nothing for this peer."""

    reason: str


class Freed(Message):
    """The memory is freed, as far as this saver holds it."""


Question = Attach | Release
Answer = HeldSnapshot | Refused | Freed


class SlotContents:
    """The contents of the slots of the arena. For any thread."""

    def __init__(self, enabled: bool = True) -> None:
        """enabled: otherwise nothing is recorded."""
        self.enabled = enabled
        self._lock = threading.Lock()
        self._held: dict[int, tuple[int, HeldSnapshot]] = {}
        """By slot: number of the job, and its snapshot."""

    def submitted(self, job: SaveJob) -> None:
        """Its slot holds another snapshot now, which is not durable yet."""
        if job.slot is not None:
            with self._lock:
                self._held.pop(job.slot, None)

    def uploaded(
        self, job: SaveJob, attempt: Attempt, shards: Sequence[Shard], chunks: Sequence[tuple[ChunkSpan, bytes]]
    ) -> None:
        """The shards and the receipt of a job are durable. chunks: with the digests of their bytes before encoding."""
        if not self.enabled or not shards or job.slot is None:
            return
        first = accumulate((len(shard.chunks.raw) for shard in shards), initial=0)
        snapshot = HeldSnapshot(
            attempt=str(attempt),
            shards={shard.name: number for shard, number in zip(shards, first, strict=False)},
            num_bytes=max((span.at + span.bytes for span, _ in chunks), default=0),
            at=[span.at for span, _ in chunks],
            raw=[span.bytes for span, _ in chunks],
            digests=b"".join(shard.chunks.digest for shard in shards),
            raw_digests=b"".join(digest for _, digest in chunks),
        )
        with self._lock:
            self._held[job.slot] = job.number, snapshot

    def ended(self, number: int, committed: bool) -> None:
        """Job `number` is committed, and earlier ones are not needed any more; or it never will be."""
        with self._lock:
            for slot, (held, _) in list(self._held.items()):
                if (held < number) if committed else (held == number):
                    del self._held[slot]

    def slots(self) -> dict[int, HeldSnapshot]:
        """The slots that hold the newest committed snapshot, and newer ones whose commit is pending."""
        with self._lock:
            return {slot: snapshot for slot, (_, snapshot) in self._held.items()}


@dataclass
class RetainedSnapshot:
    """Serves the memory to other trainers, in threads of its own, until it is freed.

    At first it frees all segments that hold nothing a trainer may need. Raises OSError, or InvalidRequest as SaverLock
    does.
    """

    _setup: Setup
    _contents: SlotContents
    _segments: dict[int, Segment]
    """By slot; emptied when the memory is freed."""

    def __post_init__(self) -> None:
        self._ended = threading.Event()
        self._lock = threading.Lock()
        """Guards the descriptors of the segments."""
        self._free(self._contents.slots())
        self._socket, self._path = _listen(self._setup.home, self._setup.run)
        self._watching = start_daemon("ckpt-retained", self._watch)
        self._accepting = start_daemon("ckpt-accept", self._accept)

    def wait(self) -> None:
        """Return when the memory is freed."""
        self._watching.join()
        self._accepting.join()

    def _watch(self) -> None:
        deadline = time.monotonic() + self._setup.retain_snapshot_s
        try:
            while not self._ended.wait(min(_LOOK_S, max(0.0, deadline - time.monotonic()))):
                self._free(self._contents.slots())
                held = sum(segment.num_bytes for segment in self._segments.values())
                available = available_bytes(environ={})
                if not held or time.monotonic() >= deadline or (available is not None and available * _RESERVE < held):
                    break
        finally:  # after any error too: nothing else would end this process
            self._ended.set()
            with suppress(OSError):
                self._path.unlink()
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # ends accept
            self._free(())

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                peer, _ = self._socket.accept()
            except OSError:
                break
            start_daemon("ckpt-answer", self._answer, peer)
        self._socket.close()

    def _answer(self, peer: socket.socket) -> None:
        channel = Channel(peer, _TIMEOUT_S)
        try:
            if not is_own(peer):
                channel.send(Refused("the peer belongs to another user"))
            elif (question := channel.receive(Question)) is not None:
                self._answer_to(question, channel)
        except (OSError, CkptError, msgspec.MsgspecError) as error:
            logger.warning("a trainer that asked for the memory of this saver was not answered: %s", error)
        finally:
            channel.close()

    def _answer_to(self, question: Question, channel: Channel) -> None:
        setup = self._setup
        if (question.store, question.run) != (setup.home, setup.run):
            channel.send(Refused(f"this saver has saved run {setup.run!r} in {setup.home}"))
        elif isinstance(question, Attach):
            self._send_held(question.attempt, channel)
        elif question.rank != setup.rank:
            channel.send(Refused(f"this is the memory of rank {setup.rank}"))
        else:
            self._ended.set()
            self._watching.join()
            channel.send(Freed())

    def _send_held(self, attempt: str, channel: Channel) -> None:
        for slot, held in self._contents.slots().items():
            if held.attempt == attempt:
                with self._lock:
                    fd = os.dup(self._segments[slot].fd) if slot in self._segments else -1
                if fd >= 0:
                    try:
                        channel.send(held, fds=[fd])
                    finally:
                        os.close(fd)
                    return
        channel.send(Refused(f"attempt {attempt} is not in memory here"))

    def _free(self, needed: Container[int]) -> None:
        with self._lock:
            for slot in [slot for slot in self._segments if slot not in needed]:
                self._segments.pop(slot).close()


def retain_snapshot(
    setup: Setup, contents: SlotContents | None, segments: dict[int, Segment]
) -> RetainedSnapshot | None:
    """Keep the memory that the next trainer may need, and free the rest. None: nothing is kept."""
    if contents is not None and contents.slots() and sys.platform == "linux":
        try:
            return RetainedSnapshot(setup, contents, segments)
        except (OSError, CkptError, RuntimeError) as error:  # RuntimeError: no more threads
            logger.warning("the memory of this saver is not kept for the next trainer: %s", error)
    while segments:
        segments.popitem()[1].close()
    return None


def ask(store: str, run: str, question: Question) -> Iterator[tuple[Answer, Channel]]:
    """The answers of all savers of a run on this host that keep memory; with the channel of each, until the next one.

    Never raises: a saver that does not answer is left out.
    """
    try:
        of_run = socket_path(store, run, "")
        # Path.glob matches the name of every file with a regular expression.
        names = [name for name in os.listdir(of_run.parent) if name.startswith(of_run.name)]
    except (CkptError, OSError):
        return
    for path in (of_run.with_name(name) for name in sorted(names) if not name.endswith(_NEW)):
        try:
            with _connected(path) as channel:
                channel.send(question)
                answer = channel.receive(Answer)
                if answer is not None:
                    yield answer, channel
        except (OSError, CkptError, msgspec.MsgspecError) as error:  # the last: of another version of this program
            if isinstance(error, ConnectionRefusedError):
                with suppress(OSError):
                    path.unlink()  # its saver was killed
            else:
                logger.info("the saver at %s does not answer: %s", path, error)


def release(store: str, run: str, rank: int) -> None:
    """Free what an earlier saver of this rank keeps; returns when it is freed."""
    for _ in ask(store, run, Release(store, run, rank)):
        pass


def is_own(peer: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket belongs to this user."""
    data = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(data)[1]) == os.getuid()


def socket_path(store: str, run: str, name: str) -> Path:
    """The socket of a saver of this run, in a folder with few files: that of the locks has those of every run there has
    ever been on this host. Raises InvalidRequest as SaverLock does."""
    path = host_path(store, run, name)
    return path.parent / "memory" / path.name


def _listen(store: str, run: str) -> tuple[socket.socket, Path]:
    path = socket_path(store, run, new_ulid(system_clock()))
    path.parent.mkdir(mode=0o700, exist_ok=True)
    new = path.with_name(path.name + _NEW)
    listening = socket.socket(socket.AF_UNIX)
    try:
        with _short(new) as name:
            listening.bind(name)
        new.chmod(0o600)
        listening.listen()
        new.rename(path)
    except BaseException:
        listening.close()
        raise
    return listening, path


@contextmanager
def _connected(path: Path) -> Iterator[Channel]:
    peer = socket.socket(socket.AF_UNIX)
    channel = Channel(peer, _TIMEOUT_S)
    try:
        with _short(path) as name:
            peer.connect(name)
        if not is_own(peer):
            raise ConnectionAbortedError(f"{path} belongs to another user")
        yield channel
    finally:
        channel.close()


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name for the path that fits into the address of a socket, which has room for 108 bytes."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
