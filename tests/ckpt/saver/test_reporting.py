"""Reporting: the far store has the backlog of a near store as soon as it can, and no backlog at the end."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from ckpt.saver.carrier import Carrier
from ckpt.saver.messages import Setup
from ckpt.saver.numbering import Numbering
from ckptstore.clock import system_clock
from ckptstore.codecs.chunk_codecs import Buffer
from ckptstore.commits.backlogs import read_backlog, write_report
from ckptstore.commits.catalog import list_checkpoints
from ckptstore.format.parsing import parse_sealed
from ckptstore.format.records import BacklogReport
from ckptstore.run import Run
from ckptstore.stores import open_store
from ckptstore.stores.base import WrappedStore
from ckptstore.tiers.carrying import backlog, enqueue
from ckptstore.tiers.source import near_id
from tests.ckptstore.tiers.test_carrying import Tiers
from tests.support.stores import FaultyStore, Switch
from tests.support.waiting import wait_until


class Recorded(WrappedStore):
    """Keeps every report that was written."""

    def __init__(self, name: str) -> None:
        self.switch = Switch()
        super().__init__(FaultyStore(open_store(f"memory://{name}/far"), self.switch))
        self.reports: list[BacklogReport] = []
        self.returns = False
        """The store answers from the next request for a report on."""

    def get(self, key: str) -> bytes:
        if self.returns and "/backlogs/" in key:
            self.switch.away = ""
        return super().get(key)

    def put(self, key: str, data: Buffer) -> None:
        super().put(key, data)
        if "/backlogs/" in key:
            self.reports.append(parse_sealed(bytes(data), BacklogReport, key))

    @property
    def seen(self) -> list[tuple[int, str]]:
        return [(report.checkpoints, report.problem) for report in self.reports]


class Host(Tiers):
    """Two stores, and the carriers of a host."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.store = Recorded(folder.name)
        self.far = Run(self.store, "gpt")
        self.generation = self.begin()
        self._home = f"file://{folder}"

    def carrier(self) -> Carrier:
        setup = Setup(
            store="", options={}, run="gpt", rank=0, world_size=1, compress="off", commit_timeout_s=1.0, daemon=None,
            token=None, far=self._home, store_retry_s=60.0,
        )  # fmt: skip
        return Carrier(self.near, self.far, setup, Numbering(self.near, print), lambda _: None, lambda _: None)

    def keep(self, *steps: int) -> None:
        """Save near, for the next carrier."""
        for step in steps:
            enqueue(self.near, self.save(step, self.generation).attempt)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_the_backlog_is_known_once_the_far_store_answers_and_none_at_the_end(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt.saver.carrier._LIST_S", 0.0)
    host.store.switch.away = " "
    carrier = host.carrier()
    for step in (1, 2, 3):
        carrier.committed(host.save(step, host.generation).attempt)
    waiting = backlog(host.near)
    wait_until(lambda: sum("get" in call for call in host.store.switch.calls) > 2, "tries to carry")
    assert host.store.reports == []  # nobody can know it
    host.store.returns = True
    carrier.finish()
    # Carrying works again after the first report; the rest is gone within the minute.
    assert [count for count, _ in host.store.seen] == [3, 2, 0]
    first, second, last = host.store.reports
    assert (first.bytes, first.since, first.oldest) == (waiting.bytes, waiting.since, str(waiting.attempts[0]))
    assert (first.url, first.near) == (host.near.store.url, near_id(host.near.store, system_clock))
    assert "connection refused" in first.problem
    assert (second.problem, last.problem, last.bytes, last.since, last.oldest) == ("", "", 0, None, None)
    known = read_backlog(host.far)
    assert known is not None
    assert (known.checkpoints, known.stores, known.reported_at) == (0, [], last.at)


def test_saves_that_are_carried_at_once_are_not_reported_one_by_one(host: Host) -> None:
    carrier = host.carrier()
    for step in range(1, 6):
        carrier.committed(host.save(step, host.generation).attempt)
        wait_until(lambda step=step: len(list_checkpoints(host.far)) == step)  # type: ignore[misc]
    carrier.finish()
    assert [count for count, _ in host.store.seen] == [1, 0]


def test_a_long_copy_is_reported_while_it_goes_on(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.saver.reporting.REPORT_S", 0.0)
    host.keep(1, 2)
    host.carrier().finish()
    counts = [count for count, _ in host.store.seen]
    assert counts == sorted(counts, reverse=True)
    assert counts.count(2) > 1
    assert counts[-1] == 0


def test_what_a_killed_saver_has_reported_is_corrected_by_the_next(host: Host) -> None:
    host.keep(1, 2)
    host.store.switch.away = "attempts"
    killed = host.carrier()
    wait_until(lambda: (2, "") in host.store.seen)
    wait_until(lambda: host.store.seen[-1] == (2, host.store.reports[-1].problem) and host.store.seen[-1][1])
    host.store.switch.away = ""
    killed.finish()
    stale = host.store.reports[0]
    write_report(host.far, stale)  # as if it had been killed after the last copy
    assert (known := read_backlog(host.far)) is not None
    assert (known.checkpoints, known.stores[0].origin.rpartition("@")[2].split(" ")[0]) == (2, socket.gethostname())
    host.carrier().finish()
    assert (known := read_backlog(host.far)) is not None
    assert known.checkpoints == 0


def test_a_near_store_without_checkpoints_reports_nothing(host: Host) -> None:
    host.carrier().finish()
    assert list(host.store.list("")) == []


def test_a_report_that_cannot_be_written_delays_no_checkpoint(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    host.store.switch.away = "backlogs"
    host.keep(1, 2)
    host.carrier().finish()
    assert [c.step for c in list_checkpoints(host.far)] == [2, 1]
    assert sum("not reported" in record.message for record in caplog.records) == 1
