"""The jobs of one daemon, or of those that share its database. Every method is one transaction, for any thread."""

from __future__ import annotations

from typing import Any

from msgspec.structs import asdict
from sqlalchemy import ColumnElement, Row, delete, insert, select, update

from ckptapi.bodies import JobBody, JobState
from ckptd.index.database import Database, retried
from ckptd.index.tables import jobs

_LIVE = (JobState.QUEUED, JobState.RUNNING)


class JobIndex:
    """The table of jobs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @retried
    def find(self, id: str) -> JobBody | None:
        """One job."""
        with self._database.read() as connection:
            row = connection.execute(select(jobs).where(jobs.c.id == id)).one_or_none()
        return _job(row) if row is not None else None

    @retried
    def newest(self, limit: int) -> list[JobBody]:
        """Jobs, newest first."""
        return self._all(None, limit)

    @retried
    def live(self, limit: int) -> list[JobBody]:
        """Jobs that have not ended, newest first."""
        return self._all(jobs.c.state.in_(_LIVE), limit)

    @retried
    def add(self, job: JobBody) -> None:
        """Insert a new job."""
        with self._database.write() as connection:
            connection.execute(
                insert(jobs).values({**asdict(job), "log": job.log or "", "heartbeat_at": job.created_at})
            )

    @retried
    def change(self, id: str, **values: Any) -> bool:
        """Change a job that has not ended. False if it has ended or was cancelled."""
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

    def _all(self, condition: ColumnElement[bool] | None, limit: int) -> list[JobBody]:
        query = select(jobs).order_by(jobs.c.created_at.desc(), jobs.c.id.desc()).limit(limit)
        with self._database.read() as connection:
            rows = connection.execute(query if condition is None else query.where(condition))
            return [_job(row) for row in rows]


def _job(row: Row[Any]) -> JobBody:
    values = dict(row._mapping)
    del values["heartbeat_at"]
    return JobBody(**values)
