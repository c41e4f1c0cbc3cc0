"""The jobs of one daemon, or of those that share its database. Every method is one transaction, for any thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from msgspec.structs import asdict
from sqlalchemy import ColumnElement, insert, select, update

from ckptapi.bodies import JobBody, JobState
from ckptd.index.database import Database, retried
from ckptd.index.tables import jobs

_LIVE = (JobState.QUEUED, JobState.RUNNING)
_JOB = [jobs.c[name] for name in JobBody.__struct_fields__]


@dataclass
class JobIndex:
    """The table of jobs."""

    _database: Database

    def find(self, id: str) -> JobBody | None:
        """One job."""
        return next(iter(self.newest(1, jobs.c.id == id)), None)

    def newest(self, limit: int, *conditions: ColumnElement[bool]) -> list[JobBody]:
        """Jobs, newest first."""
        query = select(*_JOB).where(*conditions).order_by(jobs.c.created_at.desc(), jobs.c.id.desc())
        return [JobBody(**row._mapping) for row in self._database.rows(query.limit(limit))]

    def live(self, limit: int) -> list[JobBody]:
        """Jobs that have not ended, newest first."""
        return self.newest(limit, jobs.c.state.in_(_LIVE))

    def add(self, job: JobBody) -> None:
        """Insert a new job."""
        self._database.change(
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
        silent = update(jobs).where(jobs.c.state.in_(_LIVE), jobs.c.heartbeat_at < before)
        ended = {"state": JobState.INTERRUPTED, "ended_at": now, "problem": "the daemon that ran it ended"}
        with self._database.write() as connection:
            return list(connection.scalars(silent.values(ended).returning(jobs.c.id)))

    def forget(self, before: float, keep: int) -> None:
        """Delete jobs that ended before `before`, and all but the `keep` that ended last."""
        self._database.forget_ended(jobs, before, keep)
