"""Notice of preemption: when this rank must be done, from signals, a file, a URL, or a function.

A signal handler only stores numbers. The training thread, at `Schedule.due`, does what follows from it, and the ranks
agree through the schedule's messages: one rank's notice is enough.
"""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from types import FrameType
from typing import Literal

from ckpt.host.segment import close_after_fork
from ckpt.snapshot.handle import SaveHandle
from ckptstore.clock import Clock, system_clock
from ckptstore.errors import CkptError, InvalidRequest
from ckptstore.format.shards import CHUNK_BYTES
from ckptstore.threads import start_daemon

logger = logging.getLogger(__name__)

Choice = Literal["save", "finish"]
"""save: save all state now, as fast as possible. finish: there is no time for it; finish the saves under way."""

_EVERY_S = 1.0
_ANSWER_S = 2.0
_MAX_REPLY_BYTES = 1 << 16
_RAW_HASH_SHARE = 0.25
"""The part of the encoding time of compressed chunks that remains without compression: hashing and copying."""
_COMPRESSED = 0.98
"""Stored bytes per raw byte, at most, of a save that was compressed."""
_LEAST_S = 0.05
"""The time that any save is given."""
_MARGIN = 1.25
"""The time that steps until a save, and the save, are given per second of their estimates: some are slower."""

_Handler = Callable[[int, FrameType | None], object] | int | None


@dataclass(frozen=True, slots=True)
class SaveEstimate:
    """Whether a save of all state is durable in time."""

    choice: Choice
    seconds: float
    """The time that there is."""
    estimate_s: float | None
    """The time that the save takes; None: no save has been measured yet, and it is tried."""

    def __bool__(self) -> bool:
        return self.choice == "save"

    def __str__(self) -> str:
        needed = "an unknown time" if self.estimate_s is None else f"{self.estimate_s:.1f} s"
        does = "saves all state now" if self else "finishes the saves under way, and saves no more"
        return f"{does}: a save takes {needed}, {max(0.0, self.seconds):.1f} s are left"


def estimate_save(
    seconds: float, measured: SaveHandle | None, pending: Sequence[SaveHandle], begins_in_s: float = 0.0
) -> SaveEstimate:
    """Whether a save of all state is durable within this time.

    It is staged, encoded without compression, uploaded and committed like the measured one, after the one that is
    uploaded when it begins; those that are still queued then are dropped. seconds: counted from its begin. measured:
    the newest save that is committed; None: nothing is known, and a save is tried. The progress of a first save is no
    measure: stores buffer, and other ranks may have more to write.
    """
    if measured is None:
        return SaveEstimate("save", seconds, None)
    durable_s = _durable_s(measured)
    waits_s = max(0.0, _left_s(measured, pending, begins_in_s) - begins_in_s)
    timings = measured.timings
    staged_s = timings.blocked_s - timings.wait_s + timings.held_s
    estimate_s = staged_s + waits_s + durable_s + timings.commit_s
    in_time = _MARGIN * (begins_in_s + max(_LEAST_S, estimate_s)) <= begins_in_s + seconds
    return SaveEstimate("save" if in_time else "finish", seconds, estimate_s)


def _left_s(measured: SaveHandle, pending: Sequence[SaveHandle], begins_in_s: float) -> float:
    """How long the saves take whose uploads, one after the other, have begun by then."""
    left_s = 0.0
    for number, one in enumerate(pending):
        if number and left_s >= begins_in_s:
            break
        left_s += _durable_s(measured) * _part_left(one) if number else _left_of_oldest_s(measured, one)
    return left_s


def _left_of_oldest_s(measured: SaveHandle, oldest: SaveHandle) -> float:
    """How long the save takes that is being uploaded.

    By the bytes left to upload, less the time since the last progress, which went into the next chunk: at most one
    chunk, since a store that has come to a halt makes no progress either. But no less than the measured one took, from
    its begin: what counts as uploaded may still be in buffers.
    """
    durable_s, part, timings = _durable_s(measured), _part_left(oldest), measured.timings
    chunk_s = durable_s * min(part, CHUNK_BYTES / max(oldest.progress[1], 1))
    begun_s = min(oldest.since_begin_s, measured.since_end_s)
    by_time_s = timings.encode_s + timings.upload_s - begun_s
    return max(durable_s * part - min(oldest.since_progress_s, chunk_s), by_time_s)


def _part_left(one: SaveHandle) -> float:
    done, total = one.progress
    return 1 - done / max(total, 1)


def _durable_s(measured: SaveHandle) -> float:
    """How long a save like this one takes to encode and upload without compression, and without references."""
    timings = measured.timings
    growth = max(1.0, timings.raw_bytes / max(timings.stored_bytes, 1))
    compressed = timings.stored_bytes + timings.referenced_bytes < _COMPRESSED * timings.raw_bytes
    encode_s = timings.encode_s * (_RAW_HASH_SHARE * growth if compressed else growth)
    return timings.upload_s * growth + encode_s


@dataclass(frozen=True, slots=True)
class Sources:
    """Save once more when this job is about to be preempted, and end the loop: see `Schedule.due` and `Schedule.stop`.

    With a daemon, `POST /v1/runs/{run}/preempt` there is notice as well; rank 0 of the group looks for it.

    Notice on one rank is enough; all ranks that train with a schedule end at the same step. Call it on each rank,
    before the loop. At notice, the schedule decides by `fits`: save all state now, uncompressed, without CPU limit and
    before queued saves; or only finish the saves under way.

    grace_s: seconds from notice until the processes are killed.
    signals: handled by storing the time; handlers that were installed before are called as well. Slurm's --signal sends
        one of them.
    file: a path; the file's existence is the notice. For preStop hooks and scripts.
    url: asked once a second: a metadata service of a cloud. An answer of status 200 whose text has the pattern
        `url_matches` is the notice; errors are none. url_headers: headers of the request.
    ask: called by `due` on every rank, on the training thread: seconds that are left, or None. It may be a collective
        (Ray's get_preemption_info).
    """

    grace_s: float
    signals: tuple[int, ...] = (signal.SIGTERM, signal.SIGUSR1)
    file: str | None = None
    url: str | None = None
    url_headers: Mapping[str, str] = field(default_factory=dict)
    url_matches: str = "."
    ask: Callable[[], float | None] | None = None

    def __post_init__(self) -> None:
        """Raises InvalidRequest."""
        if not self.grace_s > 0:
            raise InvalidRequest(f"grace_s {self.grace_s} is not positive", "Give the seconds from notice to the end")
        try:
            re.compile(self.url_matches)
        except re.error as error:
            message = f"url_matches {self.url_matches!r} must be a regular expression: {error}"
            raise InvalidRequest(message, "Correct the pattern") from None


@dataclass
class DaemonNotice:
    """Looks at the daemon's events for the notice of a run (POST /v1/runs/{run}/preempt). For one thread.

    Notices from before it was made are ignored: they were for the job before.
    """

    _url: str
    _token: str | None
    _run: str
    _clock: Clock = system_clock

    def __post_init__(self) -> None:
        self._since, self._after = self._clock(), 0

    def __call__(self) -> float | None:
        """The seconds that are left; None without a notice, or without an answer."""
        import httpx

        from ckptapi.client import DaemonClient

        timeout = httpx.Timeout(_ANSWER_S)
        try:
            with closing(DaemonClient(self._url, self._token, timeout=timeout, retries=0)) as client:
                # All pages: the events of a long run fill many, and the notice is on the last one.
                while True:
                    asked = self._clock()
                    page = client.events(self._after, self._run)
                    now, self._after = self._clock(), page.last_id
                    at = page.at if page.at is not None else now
                    ahead_s = 0.0 if asked <= at <= now else at - now  # the daemon's clock may be another one
                    for event in page.items:
                        if event.kind == "preempted" and event.at - ahead_s >= self._since:
                            return float(event.detail["grace_s"]) - (now - event.at + ahead_s)
                    if not page.items:
                        return None
        except CkptError as error:
            logger.debug("no answer from %s: %s", self._url, error)
        return None


@dataclass(eq=False)
class Notice:
    """The notice of this process, once it has come."""

    _sources: Sources
    _clock: Clock = system_clock
    _daemon: DaemonNotice | None = None
    _every_s: float = _EVERY_S

    def __post_init__(self) -> None:
        """Watches at once. Raises InvalidRequest outside of the main thread, if there are signals to handle."""
        sources = self._sources
        self.deadline: float | None = None
        """When this process must be done, in seconds since the epoch; None: no notice has come."""
        self.source = ""
        """The source of the notice."""
        self._before: dict[int, _Handler] = {}
        self._stop = threading.Event()
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            for number in sources.signals:
                self._before[number] = signal.signal(number, self._handle)
        except (ValueError, OSError) as error:
            self.close()
            raise InvalidRequest(f"cannot handle signals: {error}", "Call on_preemption in the main thread") from error
        if sources.file is not None or sources.url is not None or self._daemon is not None:
            start_daemon("ckpt-preemption", self._watch)
        # A forked child, such as a worker of a data loader, ends by signals as if there were no notice. It has no
        # watching thread, but a lock that this thread may have held.
        close_after_fork(self, Notice._restore_handlers)

    def look(self) -> None:
        """Ask the function, if there is one. Called by `Schedule.due`, on all ranks at the same steps.

        It is asked with notice, too: it may be a collective, and other ranks have no notice yet.
        """
        if self._sources.ask is not None and (left := self._sources.ask()) is not None:
            self._note("the function", left)

    def close(self) -> None:
        """Watch no more, and restore signal handlers that were not replaced."""
        self._stop.set()
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        # They are kept as well: a handler that was installed later may go on calling ours, which calls them.
        for number, handler in self._before.items():
            with suppress(ValueError):  # not the main thread, which keeps the handlers
                if signal.getsignal(number) == self._handle and handler is not None:
                    signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_first = self.deadline is None
        self._note(signal.Signals(number).name, self._sources.grace_s)
        before = self._before.get(number)
        # Python's own handler would interrupt the step or the save that the notice is for; a second Ctrl-C may.
        if callable(before) and not (is_first and before is signal.default_int_handler):
            before(number, frame)

    def _note(self, source: str, left_s: float) -> None:
        if self.deadline is None:
            self.source = source
            self.deadline = self._clock() + left_s

    def _watch(self) -> None:
        failed = False
        while not self._stop.wait(self._every_s) and self.deadline is None:
            try:
                self._look_around()
            except Exception as error:  # of a proxy's reply, say: the next one may be a notice
                logger.log(logging.DEBUG if failed else logging.ERROR, "cannot look for notice", exc_info=error)
                failed = True

    def _look_around(self) -> None:
        file, url = self._sources.file, self._sources.url
        if file is not None and os.path.exists(file):
            self._note(f"the file {file}", self._sources.grace_s)
        if url is not None and self._announced(url):
            self._note(url, self._sources.grace_s)
        if self._daemon is not None and (left := self._daemon()) is not None:
            self._note("the daemon", left)

    def _announced(self, url: str) -> bool:
        """Whether the answer of the URL is a notice. An error or another status is none: it is asked again."""
        try:
            request = urllib.request.Request(url, headers=dict(self._sources.url_headers))
            with self._opener.open(request, timeout=_ANSWER_S) as reply:
                body = reply.read(_MAX_REPLY_BYTES).decode(errors="replace")
        except urllib.error.HTTPError as error:
            error.close()
            return False
        except (OSError, ValueError, HTTPException) as error:
            logger.debug("no answer from %s: %s", url, error)
            return False
        return re.search(self._sources.url_matches, body) is not None


@dataclass(slots=True)
class Preemption:
    """The response of a Checkpointer to notice, for its schedules."""

    fits: Callable[[float, float], SaveEstimate]
    """See `Checkpointer.fits`."""
    expedite: Callable[[], object]
    """Makes the saves from now on as fast as possible."""
    clock: Clock = system_clock
    notice: Notice = field(default_factory=lambda: Notice(Sources(math.inf, signals=())))
    """The notice of this process; before `watch` it never comes."""

    def watch(self, sources: Sources, daemon: DaemonNotice | None = None) -> None:
        """Watch these sources, instead of those before."""
        self.notice.close()
        self.notice = Notice(sources, self.clock, daemon)
