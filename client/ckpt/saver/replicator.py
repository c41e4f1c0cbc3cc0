"""Replicator: copies the checkpoints of the local tier to the remote store, in the saver of rank 0, in a thread of its
own.

No save waits for it. Its work list, the replication queue (ckptstore.tiers.replication), is in the local tier, so that
the next saver continues it. One replicator of a host works at a time: a lock decides.

Where the local tier is full, with its disk or with the bytes that a run may have there, `on_busy` decides: a save waits
until the replicator has freed space, or it is skipped (LocalQuota). A checkpoint that is only local is never deleted to
free space.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import TypeVar

from ckpt.host.lock import note_checkpoint, noted_checkpoint, try_lock
from ckpt.saver.commit import Numbering
from ckpt.saver.messages import LocalOnly, Report, Setup, Unreplicable, Warned
from ckptstore import human
from ckptstore.commits.catalog import decided_attempts, newest_first, visible_attempts
from ckptstore.commits.generations import list_generations
from ckptstore.commits.leases import end_lease
from ckptstore.errors import (
    CkptError,
    RunVanished,
    SaveSkipped,
    StoreFull,
    StoreReadOnly,
    Superseded,
    Unavailable,
    UnsupportedFormat,
)
from ckptstore.names import Attempt
from ckptstore.retention.deletion import collect
from ckptstore.run import Run
from ckptstore.threads import start_daemon
from ckptstore.tiers.replication import (
    FOR_GOOD,
    Known,
    copy_rank,
    enqueue,
    mark_unreplicable,
    queued,
    replicate,
    replication_queue,
    trim,
    unreplicable,
)

logger = logging.getLogger(__name__)


_T = TypeVar("_T")
_IDLE_S = 10.0
"""How long nothing has to be replicated before a wait is hopeless: the replicator deletes just after it has
replicated."""


@dataclass
class LocalQuota:
    """The bytes that one run may have in its local tier. For the uploading thread; `end` for any."""

    _local: Run
    _setup: Setup
    _ending_since: float = inf

    def end(self) -> None:
        """The trainer has ended: waits last at most `retry_s` from now on."""
        self._ending_since = min(self._ending_since, time.monotonic())

    def write(self, num_bytes: int, persist: Callable[[], _T]) -> _T:
        """The result of writing this many bytes, when there is room. A write that finds none is tried again.

        Raises SaveSkipped, or StoreFull if waiting is not asked for, or is hopeless; and the errors of `persist`.
        """
        idle_since, warned = inf, False
        while True:
            try:
                self._check_room(num_bytes)
                return persist()
            except StoreFull as error:
                full = error
            if self._setup.on_busy != "wait":
                raise SaveSkipped(f"the save was skipped: {full.message}") from full
            now = time.monotonic()
            idle_since = inf if queued(self._local) else min(idle_since, now)
            if now - idle_since > _IDLE_S or now - self._ending_since > self._setup.retry_s:
                raise full
            if not warned:
                logger.warning("a save waits until checkpoints are replicated: %s", full.message)
                warned = True
            time.sleep(_LOOK_S)

    def _check_room(self, num_bytes: int) -> None:
        """Raises StoreFull if the run would have too many bytes."""
        if (limit := self._setup.local_bytes) is not None:
            used = sum(info.bytes for info in self._local.store.list(self._local.keys.attempts))
            if used + num_bytes > limit:
                raise StoreFull(
                    f"run {self._local.name!r} has {human.size(used)} of at most {human.size(limit)} in "
                    f"{self._local.store.url}, and the save needs up to {human.size(num_bytes)}",
                    "Allow more bytes locally, or keep fewer checkpoints there; see why the remote store does not "
                    "answer",
                )


REQUEST_RETRY_S = 10.0
"""How long a request to the remote store is repeated, before the whole checkpoint is."""
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 15.0
_LOOK_S = 0.5
"""How often to look whether another replicator of this host has ended, or the local tier has room."""
_LIST_S = 1.0
"""How often to list the replication queue while it is replicated: what is added is newer, and to list a long one takes
long."""


@dataclass
class Replicator:
    """Replicates the checkpoints of one local run to the remote one. Any thread may call its methods."""

    _local: Run
    _remote: Run
    _setup: Setup
    _numbering: Numbering
    _report: Callable[[Report], None]
    _replicated: Callable[[Attempt], None]
    """Called with each attempt that is now remote."""

    def __post_init__(self) -> None:
        self._known: Known = {}
        self._reported: LocalOnly | None = None
        self._reporting = threading.Lock()
        self._commits: Counter[int] = Counter()
        """By generation."""
        self._newest: tuple[Attempt, bool] | None = None
        """The newest commit, and whether it has joined the replication queue."""
        self._leases: list[str] = []
        self._unpaused = threading.Event()
        self._unpaused.set()
        self._answered_at = 0.0
        """When the remote store last took something, by the monotonic clock; while nothing fails, when a try began."""
        self._changed = threading.Condition()
        """Guards what follows."""
        self._work = True
        self._ending = False
        self._thread = start_daemon("ckpt-replicate", self._serve)

    def committed(self, attempt: Attempt) -> None:
        """A checkpoint is committed locally. The first of a generation and each `replicate_every`-th after it join the
        replication queue.

        The queue is durable on return.
        """
        due = self._commits[attempt.generation] % self._setup.replicate_every == 0
        self._commits[attempt.generation] += 1
        newest = (attempt, due and self._enqueue(attempt))
        self._newest = max(self._newest or newest, newest)
        self._unpaused.set()
        self._report_queue()
        self._wake()

    def pause(self) -> None:
        """Copy no more until the next commit, or the end: the next save is urgent."""
        self._unpaused.clear()

    def release(self, lease: str) -> None:
        """End a lease in the remote store, after what is queued."""
        self._leases.append(lease)
        self._wake()

    def finish(self) -> None:
        """Nothing more is committed: the newest checkpoint joins the replication queue. Returns when it is empty.

        Returns earlier if the remote store is away for `retry_s`, or another replicator of this host is at work.
        """
        if self._newest is not None and not self._newest[1]:
            self._enqueue(self._newest[0])
        self._unpaused.set()
        self._wake(ending=True)
        self._thread.join()

    def _enqueue(self, attempt: Attempt) -> bool:
        """Whether it has joined the replication queue."""
        try:
            enqueue(self._local, attempt)
        except CkptError as error:
            logger.warning("%s may not be replicated to %s: %s", attempt, self._remote.store.url, error)
            return False
        return True

    def _wake(self, ending: bool = False) -> None:
        with self._changed:
            self._work, self._ending = True, self._ending or ending
            self._changed.notify()

    def _serve(self) -> None:
        begun, away, pause_s = False, False, _SHORTEST_PAUSE_S
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._work)
                self._work, ending = False, self._ending
            if not away:
                self._answered_at = time.monotonic()
            try:
                if not begun:
                    self._begin()  # before anything is trimmed
                begun = True
                alone = self._replicate_all()
            except Exception as error:
                self._failed(error, first=not away)
                away = True
                if ending and time.monotonic() - self._answered_at >= self._setup.retry_s:
                    return
                self._pause(pause_s, ending)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            if not alone and not ending:
                self._pause(_LOOK_S, ending)
                continue
            if away and alone:
                self._report(Warned(f"{self._remote.store.url} answers again, and has the whole replication queue"))
            away, pause_s = False, _SHORTEST_PAUSE_S
            if ending:
                return

    def _pause(self, seconds: float, ending: bool) -> None:
        """Wait, but not when the saver begins to end: the rest is tried again then."""
        with self._changed:
            self._changed.wait_for(lambda: self._ending and not ending, seconds)
            self._work = True

    def _failed(self, error: Exception, first: bool) -> None:
        """The queue cannot be replicated for now. first: of an outage."""
        if not isinstance(error, CkptError):
            logger.exception("the queue of run %s is not replicated for now", self._local.name)
        if first:
            self._report(Warned(f"checkpoints stay local until {self._remote.store.url} answers: {error}"))
        if isinstance(error, StoreReadOnly):
            try:
                self._remote.store.reconnect()  # uses credentials that were renewed meanwhile, such as those in a file
            except CkptError as again:
                logger.warning("%s", again)

    def _begin(self) -> None:
        """Take over from a killed saver: add its last checkpoint to the replication queue, and abort its orphaned
        attempts.

        Raises Unavailable.
        """
        try:
            # It may have been killed between commit and pin, and this saver may have committed since.
            earlier = (c for c in newest_first(self._local) if not self._numbering.session_of(c.attempt.generation))
            last = next(earlier, None)
            if last is not None and last.attempt.generation and last.attempt not in unreplicable(self._local):
                enqueue(self._local, last.attempt)
            collect(self._local)
            self._copy_missing()
        except Unavailable:
            raise
        except CkptError as error:
            logger.warning("cannot look for what earlier savers have left locally: %s", error)

    def _copy_missing(self) -> None:
        """Copy to this host the shards of the newest checkpoints that lie on too few hosts, if it is to have them."""
        if self._setup.replicas is not None:
            from ckptapi.hosts import copy_missing_shards  # loads an HTTP client

            with try_lock(self._setup.home, self._setup.run, "copies") as locked:
                if locked:
                    for attempt in visible_attempts(self._local)[: self._setup.local_keep]:
                        copy_missing_shards(self._setup.store, [info.key for info in self._local.objects(attempt)])

    def _replicate_all(self) -> bool:
        """Replicate what is queued. False if another replicator of this host does. Raises Unavailable."""
        while True:
            with try_lock(self._setup.home, self._setup.run, "replicator") as locked:
                self._report_queue()
                attempts = queued(self._local) if locked else []
                if attempts:
                    self._check_mounted()
                listed_at = time.monotonic()
                for attempt in attempts:
                    self._replicate(attempt)
                    if time.monotonic() - listed_at >= _LIST_S:
                        break
            if not locked:
                return False
            trim(self._local, self._setup.local_keep, self._known)
            if not attempts:
                self._report_queue()
                while self._leases:
                    end_lease(self._remote, self._leases.pop())
                return True

    def _replicate(self, attempt: Attempt) -> None:
        try:
            own = None if self._setup.replicas is None else self._setup.rank
            done = replicate(self._local, self._remote, attempt, self._copied, own)
        except UnsupportedFormat:
            raise  # a newer program can replicate it
        except FOR_GOOD as error:
            mark_unreplicable(self._local, attempt)
            session = self._numbering.session_of(attempt.generation)
            if isinstance(error, Superseded) and session is not None:
                self._report(Unreplicable(session, error.message, error.hint))
            else:
                self._report(Warned(f"{self._local.id_of(attempt)} stays local: {error}"))
            return
        if done is not None:
            self._local.store.put_if_absent(self._local.keys.replicated, b"")
            if self._remote.store.shared_between_processes:
                note_checkpoint(self._setup.home, self._setup.run)
            self._replicated(attempt)

    def _copied(self, num_bytes: int) -> None:
        self._unpaused.wait()
        self._answered_at = time.monotonic()

    def _check_mounted(self) -> None:
        """Raises RunVanished if the remote store has nothing of a run that was replicated there: this host, or the
        local tier itself, remembers it.

        The copies would go to the disk below an unmounted volume, and the local ones would be deleted.
        """
        note = noted_checkpoint(self._setup.home, self._setup.run)
        known = note is not None or self._local.store.find(self._local.keys.replicated) is not None
        if known and not list_generations(self._remote) and not decided_attempts(self._remote):
            raise RunVanished(
                f"{self._remote.store.url} has nothing of run {self._remote.name!r}, which had checkpoints on this "
                "host before",
                "Mount the volume, or check the URL. If the run was deleted on purpose, remove "
                f"{self._local.store.object_url(self._local.keys.replicated)}{f' and {note}' if note else ''}",
            )

    def _report_queue(self) -> None:
        with self._reporting:  # what was looked up later is reported later
            try:
                found = replication_queue(self._local, self._known)
            except CkptError as error:
                logger.warning("the replication queue of run %s is not known: %s", self._local.name, error)
                return
            num_bytes, since = sum(c.needed_bytes for c in found), min((c.committed_at for c in found), default=None)
            newest = None if self._newest is None else self._newest[0].step
            now = LocalOnly(len(found), num_bytes, since, newest)
            if now != self._reported:
                self._reported = now
                self._report(now)


class ShardReplicator(Replicator):
    """Copies the shards of one rank to the remote store, where each host has a local tier of its own. The replicator of
    rank 0 commits them."""

    def __post_init__(self) -> None:
        self._due: list[Attempt] = []
        super().__post_init__()

    def _enqueue(self, attempt: Attempt) -> bool:
        self._due.append(attempt)
        return True

    def _report_queue(self) -> None:
        """Rank 0 reports it."""

    def _begin(self) -> None:
        self._copy_missing()

    def _replicate_all(self) -> bool:
        while self._due:
            try:
                copy_rank(self._local, self._remote, self._due[0], self._setup.rank, self._copied)
            except FOR_GOOD as error:
                logger.info("%s is left to rank 0: %s", self._due[0], error)
            del self._due[0]
        return True
