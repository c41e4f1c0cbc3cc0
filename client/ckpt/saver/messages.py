"""The messages between trainer and saver: length-prefixed JSON over a Unix socket.

Trainer to saver: Setup once, TrainerStarted with a descriptor per life, Slot with a descriptor per slot, Forget,
SaveJob per save, DropQueued, Expedite, Abort, Stop. Saver to trainer: SaveProgress, Released, Done, Failed, Warned,
LocalOnly, Unreplicable, Idle. If the trainer dies, the socket reaches end of file, and the saver finishes its jobs.
"""

from __future__ import annotations

import array
import errno
import os
import signal
import socket
import struct
from collections.abc import Sequence
from typing import Any

import msgspec

from ckptstore.commits.generations import NewAttempt
from ckptstore.format.decoding import decode_json
from ckptstore.format.documents import JSON, Outcome
from ckptstore.format.shards import Placed
from ckptstore.values import Value

_LENGTH = struct.Struct("<Q")
_LONGEST = 1 << 32
_MAX_FDS = 4
SHARED_STEP_BYTES = 4096
IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals: some schedulers send them to all processes of a job. A saver ends with its work, or by SIGKILL."""


class Message(Value, tag=True):
    """A message over a socket: JSON with the name of its class."""


class Setup(Message, kw_only=True):
    """The configuration of a saver; the first message."""

    store: str
    options: dict[str, Any]
    run: str
    rank: int
    world_size: int
    compress: str
    peer_timeout_s: float
    daemon: str | None
    token: str | None
    cpu_budget: float | None = None
    """Limit on the CPU time of a saver process, as a fraction of one core; None: no limit."""
    max_references: int = 32
    deltas: bool = False
    """Weights are published: store chunks as deltas of the last checkpoint, and keep its chunks in memory."""
    dedup_casts: bool = False
    statistics: bool = True
    heartbeat_s: float = 60.0
    retry_s: float = 0.0
    retain_snapshot_s: float = 0.0
    """How long a saver process keeps the newest committed snapshot after its trainer has died; 0: it does not."""
    trainer: int = 0
    """Process id of the trainer."""
    remote: str | None = None
    """The remote store, if `store` is a local one."""
    remote_options: dict[str, Any] = {}
    replicas: int | None = None
    """How many other hosts get each shard; None: all ranks share the local tier."""
    replicate_every: int = 1
    local_keep: int = 2
    local_bytes: int | None = None
    on_busy: str = "wait"

    @property
    def home(self) -> str:
        """The store by which locks and notes on this host name the run."""
        return self.remote or self.store


class TrainerStarted(Message, kw_only=True):
    """Rank 0 begins to train; the memory of its SharedStep (heartbeat_writer.py) comes with the message."""

    id: str
    parent: str | None
    began_at: float
    trains_at: float
    restored_s: float
    trackers: dict[str, str] = {}
    num_bytes: int = SHARED_STEP_BYTES


class Slot(Message):
    """A new slot of the arena; its memory comes with the message."""

    number: int
    num_bytes: int


class Forget(Message):
    """No further job uses this slot."""

    slot: int


class SaveJob(Message, kw_only=True):
    """One snapshot to make durable."""

    number: int
    slot: int | None
    """None: this rank has no shard."""
    attempt: NewAttempt
    created_at: float
    slices: list[Placed]
    """In the slot."""
    aliases: dict[str, str]
    trees: dict[str, JSON]
    local: dict[str, JSON]
    metrics: dict[str, float]
    lease: str | None
    """A lease to release after this commit, or the next one if this save fails."""
    extensions: dict[str, JSON] = {}
    """Extensions of the receipt."""


class DropQueued(Message):
    """Skip the oldest job with a slot whose upload has not begun, if there is one."""

    step: int
    """The step of the save that needs the slot."""


class Expedite(Message):
    """The trainer will be preempted: the next save is to be durable as soon as possible."""


class Abort(Message):
    """Abort an attempt: this rank takes no part in it."""

    attempt: NewAttempt
    failure: str | None = None
    """The error; None if this rank skips the attempt."""


class Stop(Message):
    """Finish all jobs, then exit."""

    retain_snapshot: bool = False
    """The trainer ends because of an error, and may start again: keep the newest committed snapshot for
    `retain_snapshot_s`."""


class SaveProgress(Message):
    """The number of raw bytes of a job that are uploaded."""

    number: int
    done_bytes: int


class Released(Message):
    """The shard and its receipt are durable: the slot may be reused."""

    number: int
    timings: dict[str, int | float]
    """Fields of the handle's Timings."""
    retries: int
    """Requests to the store that were repeated since the last report."""


class Done(Message, kw_only=True):
    """The checkpoint exists."""

    number: int
    outcome: Outcome
    commit_s: float


class Failed(Message, kw_only=True):
    """The job failed or was skipped; its slot may be reused."""

    number: int
    code: str
    message: str
    hint: str


class Warned(Message):
    """Something that the user should know; the trainer logs it."""

    message: str


class LocalOnly(Message):
    """The checkpoints that are to be replicated to the remote store, and are not there yet."""

    checkpoints: int
    bytes: int
    since: float | None
    """When the oldest of them was committed locally, by the clock of its committer; None: there is none."""
    newest: int | None = None
    """The step of the newest checkpoint in the local tier, whether it is to be replicated or not."""


class Unreplicable(Message):
    """The local saves of this session are not committed remotely: another trainer has continued the run."""

    session: str
    message: str
    hint: str


class Idle(Message):
    """All jobs have ended. The saver reports nothing more, and lives on to keep memory."""


Command = Setup | TrainerStarted | Slot | Forget | SaveJob | DropQueued | Expedite | Abort | Stop
Report = SaveProgress | Released | Done | Failed | Warned | LocalOnly | Unreplicable


class Channel:
    """One end of the socket. At any time one thread sends and one receives."""

    def __init__(self, sock: socket.socket, timeout_s: float | None = None) -> None:
        """timeout_s: limit on each send and receive; None: receive waits without limit, and the socket's own timeout is
        for sending."""
        self._sock = sock
        self._waits = timeout_s is None
        if timeout_s is not None:
            sock.settimeout(timeout_s)
        self._pending = bytearray()
        self._fds: list[int] = []

    def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Raises OSError if the peer is gone, or does not read for longer than the socket's timeout."""
        body = msgspec.json.encode(message)
        data = memoryview(_LENGTH.pack(len(body)) + body)
        with_memory = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        sent = self._sock.sendmsg([data], with_memory)
        if sent < len(data):  # the peer may have closed its end after the last byte
            self._sock.sendall(data[sent:])

    def receive(self, kind: Any) -> Any | None:
        """The next message of union `kind`; None at end of file. Raises TimeoutError if there is a limit, and
        ValueError or msgspec's errors for what is no message."""
        head = self._exactly(_LENGTH.size)
        if head is None:
            return None
        if (length := _LENGTH.unpack(head)[0]) > _LONGEST:
            raise ValueError(f"a message of {length} bytes")
        body = self._exactly(length)
        if body is None:
            return None
        return decode_json(body, kind)

    def take_fd(self) -> int:
        """The descriptor that came with the message just received. Raises OSError if there is none."""
        if not self._fds:
            raise OSError(errno.EMFILE, "no descriptor came with the message: this process may have too many open")
        return self._fds.pop(0)

    def close(self) -> None:
        """Close this end; a thread that is receiving from it gets end of file."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer is gone already
        self._sock.close()
        while self._fds:
            os.close(self._fds.pop())

    def close_in_child(self) -> None:
        """Close a forked copy of the descriptor, leaving the parent's connection alone."""
        self._sock.close()

    def _exactly(self, count: int) -> bytes | None:
        while len(self._pending) < count:
            try:
                data, fds, _, _ = socket.recv_fds(self._sock, 1 << 20, _MAX_FDS)
            except TimeoutError:
                if not self._waits:
                    raise
                continue
            except OSError:
                return None
            if not data:
                return None
            self._pending += data
            self._fds += fds
        taken = bytes(self._pending[:count])
        del self._pending[:count]
        return taken
