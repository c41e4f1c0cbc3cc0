"""Events: recorded in the index, and published at once to the requests that wait in this process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckptapi.bodies import MAX_EVENTS, EventBody, EventKind, EventsBody, JobBody
from ckptd.index import EventLog, RestoreIndex
from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import CkptError, InvalidRequest

_LOG = logging.getLogger(__name__)
KEPT = 10_000
MOST_GRACE_S = 7 * 24 * 3600.0
MOST_REASON = 1000
ANY = "events"
"""The topic of all events."""
CHECKPOINTS = "checkpoints"
"""The topic of checkpoints that are committed, deleted or corrupt; for one run, append a slash and its name."""


@dataclass
class Events:
    """Reads and records events. Any thread may use it."""

    _log: EventLog
    _restores: RestoreIndex
    _wake: Callable[[str], None]
    """Called with a topic or the id of a restore session, from any thread."""

    def __post_init__(self) -> None:
        self._log.subscribe(self.publish)
        self._lock = threading.Lock()
        self._seen = self.newest_id()
        self._ended: set[str] = set()

    def page(self, after: int, run: str | None = None, limit: int = MAX_EVENTS) -> EventsBody:
        """Events after an id, of one run or all."""
        oldest, newest = self._log.bounds()
        found = self._log.after(after, limit, run)
        last = max((event.id for event in found), default=after)
        if len(found) < limit:
            last = max(last, newest)  # those of other runs as well; an event since then may be newer
        gap = after < oldest - 1 and after != 0
        return EventsBody(items=found, last_id=last, gap=gap, at=self._log.clock())

    def of_checkpoint(self, id: str) -> list[EventBody]:
        """The events of one checkpoint, oldest first."""
        return self._log.after(0, MAX_EVENTS, checkpoint=id)

    def newest_id(self) -> int:
        """The id of the newest event."""
        return self._log.bounds()[1]

    def restore_ended(self, id: str) -> None:
        """Wake requests that wait for a restore session and record its end, once. Never raises CkptError."""
        self._wake(id)
        with self._lock:
            if id in self._ended:
                return
            if len(self._ended) >= KEPT:
                self._ended.clear()
            self._ended.add(id)
        try:
            self._record_end(id)
        except CkptError as error:
            _LOG.warning("cannot record the end of restore %s: %s", id, error)

    def preempted(self, run: str, grace_s: float, reason: str, by: str) -> EventBody:
        """Record that the job of a run will be killed in `grace_s` seconds. Raises InvalidRequest."""
        if not 0 < grace_s <= MOST_GRACE_S or len(reason) > MOST_REASON:
            raise InvalidRequest(
                f"grace_s must be above 0 and at most {MOST_GRACE_S:.0f}, reason at most {MOST_REASON} characters",
                "Give the seconds until the processes are killed",
            )
        detail = {"grace_s": grace_s, "reason": reason, "by": by}
        return self._log.add(EventBody(kind=EventKind.PREEMPTED, run=run, detail=detail))

    def job_ended(self, job: JobBody) -> None:
        """Record the end of a job."""
        detail = {"job": job.id, "kind": job.kind, "state": job.state, "code": job.code, "problem": job.problem}
        self._log.add(EventBody(kind=EventKind.JOB_ENDED, run=job.request.get("run"), detail=detail))

    def pruned(self, removed: Sequence[Checkpoint]) -> None:
        """Record the checkpoints that a prune removed, per run. Never raises CkptError: the prune is already done."""
        by_run: dict[str, list[Checkpoint]] = {}
        for checkpoint in removed:
            by_run.setdefault(checkpoint.run, []).append(checkpoint)
        try:
            for run, gone in by_run.items():
                freed = sum(checkpoint.stored_bytes for checkpoint in gone)
                detail = {"removed": len(gone), "freed_bytes": freed}
                self._log.add(EventBody(kind=EventKind.PRUNED, run=run, detail=detail))
        except CkptError as error:
            _LOG.warning("cannot record a prune: %s", error)

    def _record_end(self, id: str) -> None:
        restore = self._restores.find(id)
        if restore is None or restore.live:
            return
        if any(event.detail.get("restore") == id for event in self.of_checkpoint(restore.checkpoint.id)):
            return  # recorded by this daemon before a restart, or by another daemon
        detail = {
            "restore": id,
            "key": restore.key,
            "state": restore.state,
            "world_size": restore.world_size,
            "seconds": (restore.ended_at or restore.created_at) - restore.created_at,
            "bytes": int(restore.done_bytes),
            "problem": restore.problem,
        }
        self._log.add(
            EventBody(kind=EventKind.RESTORE_ENDED, run=restore.run, checkpoint=restore.checkpoint.id, detail=detail)
        )

    def publish(self, events: Sequence[EventBody]) -> None:
        """Wake the requests that wait for one of these events."""
        self._wake(ANY)
        changed = {event.run for event in events if event.kind in _OF_CHECKPOINTS}
        if changed:
            self._wake(CHECKPOINTS)
        for run in changed:
            self._wake(f"{CHECKPOINTS}/{run}")
        for event in events:
            if event.kind == EventKind.RESTORE_ENDED:
                self._wake(event.detail["restore"])

    def follow(self, refresh: Callable[[], object]) -> None:
        """Publish events that other daemons on the same database have recorded. For one background thread.

        refresh: brings what requests are answered from up to date. It runs after the events are read and before they
        are published: a request that wakes would otherwise find the old state, and wait for an event that is past.
        """
        found = self._log.after(self._seen, MAX_EVENTS)
        refresh()
        if found:
            self._seen = found[-1].id
            self.publish(found)

    def forget(self) -> None:
        """Delete the oldest events."""
        self._log.trim(KEPT)


_OF_CHECKPOINTS = frozenset((EventKind.COMMITTED, EventKind.DELETED, EventKind.CORRUPT))
