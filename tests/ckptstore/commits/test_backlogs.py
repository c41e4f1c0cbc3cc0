"""Backlogs: the sum of what near stores have reported, of reports that can be believed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ckptstore.commits.backlogs import KEPT_S, read_backlog, total, write_report
from ckptstore.format.documents import FORMAT
from ckptstore.format.parsing import seal
from ckptstore.format.records import ORIGIN, BacklogReport
from ckptstore.names import Attempt, new_ulid
from ckptstore.retention.deletion import collect
from ckptstore.run import Run
from ckptstore.stores import Store
from tests.support.stores import MovableClock

ONE, OTHER, THIRD = (new_ulid(float(number)) for number in (1, 2, 3))


def report(near: str, checkpoints: int, since: float = 0.0, at: float = 100.0, **changed: Any) -> BacklogReport:
    oldest = str(Attempt(int(since), ONE, generation=1)) if checkpoints else None
    made = BacklogReport(
        format=FORMAT, kind="backlog", run="gpt", near=near, url="file:///mnt/nvme", by="me", at=at,
        checkpoints=checkpoints, bytes=1000 * checkpoints, since=since if checkpoints else None, oldest=oldest,
        problem="", extensions={ORIGIN: {"user": "ann", "host": "a"}},
    )  # fmt: skip
    return msgspec.structs.replace(made, **changed)


@pytest.fixture
def run(store: Store) -> Run:
    return Run(store, "gpt")


def test_the_near_stores_of_a_run_are_added_up(run: Run) -> None:
    assert read_backlog(run) is None
    for one in (report(ONE, 2, since=20.0, at=90.0), report(OTHER, 3, since=10.0), report(THIRD, 0, at=50.0)):
        write_report(run, one)
    found = read_backlog(run)
    assert found is not None
    assert (found.checkpoints, found.bytes, found.since, found.reported_at) == (5, 5000, 10.0, 90.0)
    assert [(one.near, one.origin) for one in found.stores] == [(OTHER, "ann@a"), (ONE, "ann@a")]
    assert found.stores[0].oldest == f"gpt@10.{ONE}"


def test_the_newest_report_of_a_near_store_counts(run: Run) -> None:
    write_report(run, report(ONE, 2))
    write_report(run, report(ONE, 0, at=200.0))
    found = read_backlog(run)
    assert found is not None
    assert (found.checkpoints, found.bytes, found.since, found.reported_at) == (0, 0, None, 200.0)


@pytest.mark.parametrize(
    "wrong",
    [
        b"noise",
        seal(report(ONE, 2, run="other")),
        seal(report(OTHER, 2)),
        seal(msgspec.structs.replace(report(ONE, 2), checkpoints=-1)),
        seal(report(ONE, 2, bytes=-1)),
        seal(msgspec.structs.replace(report(ONE, 2), since=None)),
        seal(report(ONE, 2, oldest="../../etc")),
        seal(report(ONE, 0, bytes=1)),
    ],
)
def test_a_report_that_makes_no_sense_is_left_out(run: Run, wrong: bytes) -> None:
    run.store.put(run.keys.backlog(ONE), wrong)
    run.store.put(f"{run.keys.backlogs}foreign.json", b"{}")
    assert read_backlog(run) is None
    write_report(run, report(OTHER, 1))
    found = read_backlog(run)
    assert found is not None
    assert found.checkpoints == 1


def test_a_near_store_that_reports_no_more_is_forgotten_after_a_month(run: Run) -> None:
    clock = MovableClock()
    later = Run(run.store, run.name, clock)
    write_report(run, report(ONE, 2))
    collect(later)
    assert read_backlog(later) is not None
    clock.advance(KEPT_S + 60.0)
    collect(later)
    assert read_backlog(later) is None


def test_no_report_is_no_backlog() -> None:
    assert total([]) is None
