from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from ckptapi import bodies
from ckptapi.bodies import JobBody, JobState
from ckptd.index import Database, EventLog, Index, JobIndex
from ckptd.services.events import Events
from ckptd.services.jobs import MAX_LIVE, JobProgress, Jobs
from ckptstore.errors import TooManyRequests
from tests.conftest import on_both
from tests.support.waiting import wait_until

ULID = "01M7Y6P7WGCXV53EY39EPJ6JT8"
Work = Callable[[Any, JobProgress], dict[str, Any] | None]


class Bench:
    """Jobs over an index, whose work the test holds."""

    def __init__(self, database: Database, work: Work) -> None:
        self.now = 1000.0
        Index(database).adopt("file:///store", 0.0)
        self.index = JobIndex(database)
        self.log = EventLog(database, self.clock)
        events = Events(self.log, None, lambda _: None)  # type: ignore[arg-type]
        self.jobs = Jobs(self.index, events, self.clock, {bodies.CollectJob: work})

    def clock(self) -> float:
        return self.now

    def ended(self, job: JobBody) -> JobBody:
        wait_until(lambda: not self.jobs.find(job.id).state.live, "the end of the job")
        return self.jobs.find(job.id)


@pytest.fixture
def bench(database: Database) -> Iterator[Callable[[Work], Bench]]:
    with ExitStack() as stack:

        def make(work: Work) -> Bench:
            made = Bench(database, work)
            made.jobs.start()
            stack.callback(made.jobs.stop, 10)
            return made

        yield make


@on_both
def test_a_running_job_ends_at_its_next_step_after_a_cancel(bench: Any) -> None:
    began, go_on = threading.Event(), threading.Event()

    def work(_: object, progress: JobProgress) -> None:
        progress.expect(10, "steps")
        progress.advance(1)
        began.set()
        assert go_on.wait(30)
        for _step in range(9):
            progress.advance(1)
        raise AssertionError("it was not cancelled")

    made = bench(work)
    job = made.jobs.submit(bodies.CollectJob())
    assert began.wait(30)
    assert made.jobs.cancel(job.id).cancelling
    go_on.set()
    ended = made.ended(job)
    assert (ended.state, ended.total, made.jobs.cancel(job.id)) == (JobState.CANCELLED, 10, ended)


@on_both
def test_a_waiting_job_never_begins_after_a_cancel(bench: Any) -> None:
    go_on = threading.Event()
    ran = []

    def work(_: object, progress: JobProgress) -> None:
        ran.append(1)
        assert go_on.wait(30)

    made = bench(work)
    jobs = [made.jobs.submit(bodies.CollectJob()) for _ in range(3)]
    wait_until(lambda: len(ran) == 2, "two jobs at work")
    assert made.jobs.cancel(jobs[2].id).state is JobState.CANCELLED
    go_on.set()
    assert [made.ended(job).state for job in jobs] == [JobState.SUCCEEDED, JobState.SUCCEEDED, JobState.CANCELLED]
    assert len(ran) == 2


def test_a_mistake_of_ours_fails_the_job_and_no_other(bench: Any) -> None:
    def work(_: object, progress: JobProgress) -> dict[str, Any]:
        if not made.jobs.find(first.id).state.live:
            return {"fine": True}
        raise ZeroDivisionError

    made = bench(work)
    first = made.jobs.submit(bodies.CollectJob())
    assert (made.ended(first).state, made.ended(first).code) == (JobState.FAILED, "internal")
    assert made.ended(made.jobs.submit(bodies.CollectJob())).result == {"fine": True}


@on_both
def test_jobs_of_a_daemon_that_is_gone_are_interrupted(bench: Any) -> None:
    made = bench(lambda _request, _progress: None)
    made.index.add(JobBody(id=ULID, kind="gc", request={}, state=JobState.RUNNING, created_at=900.0, started_at=901.0))
    made.index.change(ULID, heartbeat_at=990.0)
    made.jobs.watch()
    assert made.jobs.find(ULID).state is JobState.RUNNING
    made.now += 10
    made.jobs.watch()
    found = made.jobs.find(ULID)
    assert (found.state, found.ended_at) == (JobState.INTERRUPTED, made.now)
    assert [event.detail["state"] for event in made.log.after(0, 10)] == ["interrupted"]


@on_both
def test_a_job_that_works_for_long_is_not_taken_for_gone(bench: Any) -> None:
    go_on = threading.Event()
    made = bench(lambda _request, _progress: {"done": go_on.wait(30)})
    job = made.jobs.submit(bodies.CollectJob())
    wait_until(lambda: made.jobs.find(job.id).state is JobState.RUNNING, "its begin")
    for _ in range(5):
        made.now += 10
        made.jobs.watch()
    go_on.set()
    assert made.ended(job).state is JobState.SUCCEEDED


def test_the_number_of_jobs_is_limited(bench: Any) -> None:
    go_on = threading.Event()
    made = bench(lambda _request, _progress: {"done": go_on.wait(60)})
    for _ in range(MAX_LIVE):
        made.jobs.submit(bodies.CollectJob())
    with pytest.raises(TooManyRequests):
        made.jobs.submit(bodies.CollectJob())
    go_on.set()


def test_a_log_keeps_its_newest_lines(bench: Any) -> None:
    def work(_: object, progress: JobProgress) -> None:
        for number in range(20_000):
            progress.log(f"line {number}")

    made = bench(work)
    log = made.ended(made.jobs.submit(bodies.CollectJob())).log
    assert len(log) <= 64 << 10
    assert log.endswith("line 19999\n")
