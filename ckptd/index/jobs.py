"""The jobs of one daemon, or of those that share its database. Every method is one transaction, for any thread."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Row, delete, insert, select, update

from ckptapi.bodies import JobState
from ckptd.index.database import Database, retried
from ckptd.index.tables import jobs

_LIVE = (JobState.QUEUED, JobState.RUNNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job."""

    id: str
    kind: str
    request: dict[str, Any]
    state: JobState
    created_at: float
    heartbeat_at: float
    """Time of the last heartbeat of its daemon."""
    started_at: float | None = None
    ended_at: float | None = None
    done: float = 0.0
    total: float = 0.0
    unit: str = ""
    cancelling: bool = False
    code: str = ""
    problem: str = ""
    result: dict[str, Any] | None = None
    log: str = ""


class JobIndex:
    """The table of jobs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @retried
    def find(self, id: str) -> Job | None:
        """One job."""
        with self._database.read() as connection:
            row = connection.execute(select(jobs).where(jobs.c.id == id)).one_or_none()
        return _job(row) if row is not None else None

    @retried
    def newest(self, limit: int) -> list[Job]:
        """Jobs, newest first."""
        return self._all(None, limit)

    @retried
    def live(self, limit: int) -> list[Job]:
        """Jobs that have not ended, newest first."""
        return self._all(jobs.c.state.in_(_LIVE), limit)

    @retried
    def add(self, job: Job) -> None:
        """Insert a new job."""
        with self._database.write() as connection:
            connection.execute(insert(jobs).values(_values(job)))

    @retried
    def change(self, id: str, **values: Any) -> bool:
        """Change a job that has not ended. False if it has ended or was cancelled."""
        if values.get("result") is not None:
            values["result"] = json.dumps(values["result"])
        with self._database.write() as connection:
            same = (jobs.c.id == id, jobs.c.state.in_(_LIVE))
            changed = connection.execute(update(jobs).where(*same).values(values)).rowcount == 1
            return changed and not connection.scalar(select(jobs.c.cancelling).where(jobs.c.id == id))

    @retried
    def interrupt(self, before: float, now: float) -> list[str]:
        """End the jobs without a heartbeat since `before`; returns their ids."""
        silent = (jobs.c.state.in_(_LIVE), jobs.c.heartbeat_at < before)
        with self._database.write() as connection:
            found = list(connection.scalars(select(jobs.c.id).where(*silent)))
            ended = {"state": JobState.INTERRUPTED, "ended_at": now, "problem": "the daemon that ran it ended"}
            connection.execute(update(jobs).where(*silent).values(ended))
        return found

    @retried
    def forget(self, before: float, keep: int) -> None:
        """Delete jobs that ended before `before`, and all but the `keep` that ended last."""
        ended_at = jobs.c.ended_at
        with self._database.write() as connection:
            newest = select(ended_at).where(ended_at.is_not(None)).order_by(ended_at.desc())
            crowded_out: float | None = connection.scalar(newest.offset(keep).limit(1))
            connection.execute(delete(jobs).where(ended_at < before))
            if crowded_out is not None:
                connection.execute(delete(jobs).where(ended_at <= crowded_out))

    def _all(self, condition: ColumnElement[bool] | None, limit: int) -> list[Job]:
        query = select(jobs).order_by(jobs.c.created_at.desc(), jobs.c.id.desc()).limit(limit)
        with self._database.read() as connection:
            rows = connection.execute(query if condition is None else query.where(condition))
            return [_job(row) for row in rows]


_PLAIN = (
    "id", "kind", "created_at", "heartbeat_at", "started_at", "ended_at", "done", "total", "unit", "code", "problem",
    "log",
)  # fmt: skip


def _values(job: Job) -> dict[str, Any]:
    values = {name: getattr(job, name) for name in _PLAIN}
    result = json.dumps(job.result) if job.result is not None else None
    return values | {
        "state": job.state,
        "cancelling": int(job.cancelling),
        "request": json.dumps(job.request),
        "result": result,
    }


def _job(row: Row[Any]) -> Job:
    return Job(
        **{name: row._mapping[name] for name in _PLAIN},
        state=JobState(row.state),
        cancelling=bool(row.cancelling),
        request=json.loads(row.request),
        result=json.loads(row.result) if row.result is not None else None,
    )
