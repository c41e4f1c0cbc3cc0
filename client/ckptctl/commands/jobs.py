"""jobs: lists, follows and cancels the jobs of a daemon."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec

from ckptapi.bodies import JobBody, JobState
from ckptctl.commands.arguments import NewestOption, a_flag, an_argument
from ckptctl.render import Block, Row, Table
from ckptctl.session import Session
from ckptstore import human
from ckptstore.errors import InvalidRequest

_STYLES = {
    JobState.QUEUED: "dim",
    JobState.RUNNING: "",
    JobState.SUCCEEDED: "green",
    JobState.FAILED: "red",
    JobState.CANCELLED: "dim",
    JobState.INTERRUPTED: "yellow",
}


def jobs(
    session: Session,
    id: Annotated[str | None, an_argument("Show this job with its log.", "JOB")] = None,
    cancel: Annotated[bool, a_flag("Cancel the job.", "--cancel")] = False,
    wait: Annotated[bool, a_flag("Wait until the job has ended.", "--wait", "-w")] = False,
    limit: NewestOption = 20,
) -> None:
    """Show the jobs of a daemon: verifications and collections."""
    daemon = session.daemon("jobs")
    if id is None:
        if cancel or wait:
            raise InvalidRequest("--cancel and --wait need a job", "ckptctl jobs lists them")
        found, now = daemon.jobs(limit), session.clock()
        rows = [
            Row(
                (j.id, j.kind, _state(j), _done(j), human.age(now - j.created_at), _subject(j), j.problem),
                _STYLES[j.state],
            )
            for j in found
        ]
        table = Table(("JOB", "KIND", "STATE", ">DONE/1", ">AGE/2", "OF", "PROBLEM"), rows)
        session.screen.emit(found, [job.id for job in found], [table])
        return
    job = daemon.cancel_job(id) if cancel else daemon.job(id)
    if wait:
        job = daemon.wait_for_job(job)
    session.screen.emit(job, [job.id], job_blocks(job, session.clock()))


def job_blocks(job: JobBody, now: float) -> Iterator[Block]:
    """One job with its log, for tables."""
    ended_at = job.ended_at
    facts = {
        "job": job.id,
        "kind": job.kind,
        "of": _subject(job),
        "state": _state(job),
        "begun": f"{human.moment(job.created_at)}, {human.age(now - job.created_at)} ago",
        "took": "" if ended_at is None else human.duration(ended_at - (job.started_at or ended_at)),
        "done": _done(job),
        "problem": job.problem,
        "result": "" if job.result is None else msgspec.json.encode(job.result).decode(),
    }
    yield {name: value for name, value in facts.items() if value}
    if job.log:
        yield ""
        yield from job.log.splitlines()


def _state(job: JobBody) -> str:
    return f"{job.state}, being cancelled" if job.cancelling and job.state.live else job.state


def _subject(job: JobBody) -> str:
    return str(job.request.get("checkpoint") or job.request.get("run") or "all runs")


def _done(job: JobBody) -> str:
    if not job.total:
        return ""
    if job.unit == "bytes":
        return f"{human.size(job.done)} of {human.size(job.total)}"
    return f"{job.done:.0f} of {job.total:.0f} {job.unit}"
