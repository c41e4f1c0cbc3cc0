"""What a daemon shows of near stores: in its metrics, its API, its pages and through ckptctl."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ckptapi import bodies
from ckptapi.client import DaemonClient
from ckptd.index import Database, EventLog, Index
from ckptd.services.backlogs import Backlogs
from ckptstore.clock import system_clock
from ckptstore.commits.backlogs import write_report
from ckptstore.errors import NoCheckpoint, StoreUnavailable
from ckptstore.run import Run
from ckptstore.stores import Store, open_store
from tests.ckptstore.commits.test_backlogs import ONE, OTHER, report
from tests.support.checkpoints import write_checkpoint
from tests.support.command_line import invoke
from tests.support.daemons import Daemon, running_daemon
from tests.support.stores import FaultyStore, MovableClock, Switch
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that has ended, and left checkpoints in two near stores."""
    run = Run(open_store(str(tmp_path_factory.mktemp("backlogs") / "store")), "gpt")
    for step in (1, 2):
        write_checkpoint(run.store, step=step)
    write_checkpoint(run.store, "bert", 5)
    now = system_clock()
    write_report(run, report(ONE, 2, since=now - 3000, at=now - 40, problem="<b>token expired</b>"))
    write_report(run, report(OTHER, 3, since=now - 7300, at=now - 7200))
    write_report(Run(run.store, "bert"), report(ONE, 0, at=now, run="bert"))
    return run


@pytest.fixture(scope="module")
def daemon(run: Run) -> Iterator[Daemon]:
    with running_daemon(run.store.url) as daemon:
        yield daemon


def _metrics(daemon: Daemon) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in daemon.get("/metrics").text.splitlines() if "ckptd_backlog" in line]
    return {name: float(value) for name, _, value in lines if not name.startswith("#")}


def test_metrics_count_every_near_store_and_their_oldest_report(daemon: Daemon) -> None:
    wait_until(lambda: _metrics(daemon), "the first refresh")
    found = _metrics(daemon)
    assert found['ckptd_backlog_checkpoints{run="gpt"}'] == 5
    assert found['ckptd_backlog_bytes{run="gpt"}'] == 5000
    assert found['ckptd_backlog_age_seconds{run="gpt"}'] >= 7300
    assert 7200 <= found['ckptd_backlog_report_age_seconds{run="gpt"}'] < found['ckptd_backlog_age_seconds{run="gpt"}']
    assert {name: value for name, value in found.items() if "bert" in name} == {
        'ckptd_backlog_checkpoints{run="bert"}': 0, 'ckptd_backlog_bytes{run="bert"}': 0
    }  # fmt: skip


def test_the_api_has_the_backlog_of_one_run_and_of_all(daemon: Daemon, run: Run) -> None:
    with closing(DaemonClient(daemon.url)) as client:
        one = client.run_summary("gpt")
        assert one.backlog is not None
        assert (one.num_checkpoints, one.backlog.checkpoints, one.backlog.bytes) == (2, 5, 5000)
        assert [(near.near, near.origin) for near in one.backlog.stores] == [(OTHER, "ann@a"), (ONE, "ann@a")]
        assert {item.run: item for item in client.run_summaries()}["gpt"].backlog == one.backlog
        with pytest.raises(NoCheckpoint):
            client.run_summary("none")
        write_report(Run(run.store, "new"), report(ONE, 1, since=1.0, run="new"))
        assert (new := client.run_summary("new").backlog) is not None  # nothing of it is far yet
        assert new.checkpoints == 1
    assert daemon.get(f"{bodies.RUNS}/gpt?wait=1").status_code == 422


def test_pages_show_what_is_near_only_and_how_old_the_report_is(daemon: Daemon) -> None:
    page = daemon.get("/runs/gpt").text
    assert "2 checkpoints near only (2.0 KiB), the oldest for 50m; reported" in page
    assert "3 checkpoints near only (2.9 KiB), the oldest for 2h 01m; reported 2h 00m ago" in page
    assert "ann@a: <code>file:///mnt/nvme</code>" in page
    assert "&lt;b&gt;token expired" in page
    assert "near only" not in daemon.get("/runs/bert").text
    rows = daemon.get("/").text.split("<tr>")
    assert "5 checkpoints near only (4.9 KiB)" in next(row for row in rows if "/runs/gpt" in row)
    assert "near only" not in next(row for row in rows if "/runs/bert" in row)


def test_the_page_of_a_run_without_far_checkpoints_names_the_near_ones(daemon: Daemon, run: Run) -> None:
    write_report(Run(run.store, "new"), report(ONE, 2, since=1.0, run="new"))
    for page in ("/runs/new", "/runs/new/state"):
        reply = daemon.get(page)
        assert reply.status_code == 404
        assert "no checkpoint here, and 2 near only: file:///mnt/nvme of ann@a" in reply.text
    assert "near only" not in daemon.get("/runs/none").text


def test_the_command_line_shows_it_on_a_store_and_through_a_daemon(daemon: Daemon, run: Run) -> None:
    for target in (("--store", run.store.url), ("--url", daemon.url)):
        noted = invoke("ls", "gpt", *target)
        assert "3 checkpoints near only (2.9 KiB), the oldest for 2h 01m; reported 2h 00m ago by ann@a" in noted.stderr
        assert "token expired" in noted.stderr
        assert "near only" not in invoke("ls", "bert", *target).stderr
        head, *rows = invoke("runs", *target).stdout.splitlines()
        assert head.endswith("NEAR ONLY")
        assert next(row for row in rows if "gpt" in row).endswith("5, reported 2h 00m ago")


def test_while_the_store_is_away_the_last_reports_stay(tmp_path: Path) -> None:
    switch, clock = Switch(), MovableClock()
    store: Store = FaultyStore(open_store(str(tmp_path / "store")), switch)
    database = Database(f"sqlite:///{tmp_path}/index.db", 5)
    backlogs = Backlogs(store, Index(database, EventLog(database, clock)), clock)
    run = Run(store, "gpt")
    write_report(run, report(ONE, 2))
    backlogs.refresh()
    switch.away = " "
    with pytest.raises(StoreUnavailable):
        backlogs.refresh()
    assert (known := backlogs.last_of_run("gpt")) is not None
    assert (known.checkpoints, backlogs.known()["gpt"].reported_at) == (2, 100.0)
    switch.away = ""
    clock.advance(3600.0)  # idle by now; what had a backlog is read in every round
    write_report(run, report(ONE, 0, at=200.0))
    backlogs.refresh()
    assert backlogs.known()["gpt"].checkpoints == 0
    store.delete_many([run.keys.backlog(ONE)])
    store.put("other/x", b"")
    for _ in range(6):
        backlogs.refresh()
    assert backlogs.known() == {}
    database.close()
