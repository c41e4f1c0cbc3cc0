"""Jobs: long background work with progress, a log and cancellation."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ckptapi.bodies import JobBody, JobRequest, JobState
from ckptd.index import JobIndex
from ckptd.services.events import Events
from ckptstore.clock import Clock
from ckptstore.errors import CkptError, NotFound, TooManyRequests
from ckptstore.names import check_ulid, new_ulid

_LOG = logging.getLogger(__name__)
WORKERS = 2
MAX_LIVE = 100
_SILENT_S = 15.0
_REPORT_EVERY_S = 0.3
_LOG_CHARACTERS = 64 << 10
_KEPT_S = 7 * 24 * 3600.0
_KEPT_ENDED = 500


class JobCancelled(Exception):
    """The job was cancelled, or the daemon is shutting down."""


@dataclass
class JobProgress:
    """Progress reports of a running job. Each call raises JobCancelled if the job must end; any thread may call."""

    _index: JobIndex
    _id: str
    _clock: Clock
    by: str
    """The caller that submitted the job."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._reported_at = 0.0
        self._cancelled = threading.Event()
        self._values: dict[str, Any] = {"done": 0.0, "total": 0.0, "unit": "", "log": ""}

    def expect(self, total: float, unit: str) -> None:
        """Set the total amount of work."""
        self._note(True, total=float(total), unit=unit)

    def advance(self, count: float) -> None:
        """Add to the amount of work that is done."""
        with self._lock:
            self._values["done"] += count
        self._note(False)

    def log(self, line: str) -> None:
        """Append a line to the log of the job."""
        with self._lock:
            self._values["log"] = (self._values["log"] + line + "\n")[-_LOG_CHARACTERS:]
        self._note(False)

    def cancel(self) -> None:
        """Make the next call raise JobCancelled."""
        self._cancelled.set()

    def heartbeat(self) -> None:
        """Write a heartbeat to the index, and what was reported so far."""
        if not self._index.change(self._id, heartbeat_at=self._clock(), **self.values()):
            self._cancelled.set()

    def values(self) -> dict[str, Any]:
        """Everything reported so far, as columns of the index."""
        with self._lock:
            return dict(self._values)

    def _note(self, at_once: bool, **values: object) -> None:
        if self._cancelled.is_set():
            raise JobCancelled
        with self._lock:
            self._values |= values
            due = at_once or self._clock() - self._reported_at >= _REPORT_EVERY_S or self._clock() < self._reported_at
            if due:
                self._reported_at = self._clock()
        if due:
            self.heartbeat()
            if self._cancelled.is_set():
                raise JobCancelled


JobHandler = Callable[[Any, JobProgress], dict[str, Any] | None]
"""Runs a job of one kind, given its request; returns its result."""


@dataclass
class Jobs:
    """Starts, monitors and ends jobs. Any thread may call any method."""

    _index: JobIndex
    _events: Events
    _clock: Clock
    _handlers: Mapping[type, JobHandler]

    def __post_init__(self) -> None:
        self.newest = self._index.newest
        self._queue: queue.SimpleQueue[tuple[str, JobRequest, str] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._running: dict[str, JobProgress] = {}
        self._waiting: set[str] = set()
        # Daemon threads: a store that never answers must not keep the process from exiting.
        self._threads = [threading.Thread(target=self._loop, name=f"job-{n}", daemon=True) for n in range(WORKERS)]

    def start(self) -> None:
        """Start the worker threads."""
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s: float) -> None:
        """Cancel running jobs and wait at most `timeout_s` seconds. Jobs that are still running are interrupted."""
        for _ in self._threads:
            self._queue.put(None)
        with self._lock:
            for progress in self._running.values():
                progress.cancel()
        for thread in self._threads:
            thread.join(timeout_s / WORKERS)

    def submit(self, request: JobRequest, by: str = "ckptd") -> JobBody:
        """Enqueue a job; it runs when a worker is free. by: the caller that submits it. Raises TooManyRequests."""
        if len(self._index.live(MAX_LIVE)) >= MAX_LIVE:
            raise TooManyRequests(
                f"{MAX_LIVE} jobs are queued or running", "Wait, or cancel some: DELETE /v1/jobs/{id}"
            )
        now = self._clock()
        body: dict[str, Any] = msgspec.to_builtins(request)
        kind = body.pop("kind")
        job = JobBody(id=new_ulid(now), kind=kind, request=body, state=JobState.QUEUED, created_at=now)
        with self._lock:
            self._waiting.add(job.id)
        self._index.add(job)
        self._queue.put((job.id, request, by))
        return job

    def find(self, id: str) -> JobBody:
        """One job. Raises NotFound."""
        found = self._index.find(check_ulid(id))
        if found is None:
            raise NotFound(
                f"there is no job {id}",
                "It ended long ago, or the daemon's database was deleted; GET /v1/jobs lists the jobs",
            )
        return found

    def cancel(self, id: str) -> JobBody:
        """Cancel a job: it ends at its next report, on any daemon. An ended job is unchanged. Raises NotFound."""
        job = self.find(id)
        if job.state is JobState.QUEUED:
            self._end(id, JobState.CANCELLED)
        elif job.state is JobState.RUNNING:
            self._index.change(id, cancelling=True)
            with self._lock:
                progress = self._running.get(id)
            if progress is not None:
                progress.cancel()
        return self.find(id)

    def watch(self) -> None:
        """Send heartbeats, and end jobs whose daemon is gone. For one background thread."""
        with self._lock:
            running, waiting = list(self._running.values()), list(self._waiting)
        for progress in running:
            progress.heartbeat()
        for id in waiting:
            self._index.change(id, heartbeat_at=self._clock())
        now = self._clock()
        for id in self._index.interrupt(now - _SILENT_S, now):
            self._events.job_ended(self.find(id))
        self._index.forget(now - _KEPT_S, _KEPT_ENDED)

    def _loop(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                self._run(*item)
            except Exception:
                _LOG.exception("job %s failed", item[0])

    def _run(self, id: str, request: JobRequest, by: str) -> None:
        progress = JobProgress(self._index, id, self._clock, by)
        with self._lock:
            self._running[id] = progress
            self._waiting.discard(id)
        try:
            now = self._clock()
            if not self._index.change(id, state=JobState.RUNNING, started_at=now, heartbeat_at=now):
                return  # cancelled while it was queued
            result = self._handlers[type(request)](request, progress)
        except JobCancelled:
            self._end(id, JobState.CANCELLED, **progress.values())
        except CkptError as error:
            self._end(id, JobState.FAILED, **progress.values(), code=error.code, problem=str(error))
        except Exception as error:
            _LOG.exception("job %s failed", id)
            self._end(id, JobState.FAILED, **progress.values(), code="internal", problem=type(error).__name__)
        else:
            self._end(id, JobState.SUCCEEDED, **progress.values(), result=result)
        finally:
            with self._lock:
                self._running.pop(id, None)

    def _end(self, id: str, state: JobState, **values: Any) -> None:
        self._index.change(id, state=state, ended_at=self._clock(), **values)
        job = self.find(id)
        if job.state is state:
            self._events.job_ended(job)
