"""Real daemons on one PostgreSQL: one leads; stopped or killed, another one does, and nothing is swept twice."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ckptstore.clock import system_clock
from ckptstore.commits.catalog import list_checkpoints
from ckptstore.names import Attempt, new_ulid
from ckptstore.retention.deletion import hide
from ckptstore.run import Run
from ckptstore.stores import Store
from tests.ckptd.housekeeping.counted_daemon import STOP_AT
from tests.support.checkpoints import write_checkpoint, write_rank
from tests.support.daemons import Daemon, running_daemon
from tests.support.postgresql import PostgresqlServer
from tests.support.waiting import wait_until

LEASE_S = 3.0
"""For a busy machine. test_leadership.py holds them to the second, by a clock that it moves itself."""
_LEADS = "is now the leader, epoch"
_OPTIONS = ("--leader-lease-seconds", str(LEASE_S), "--collect-seconds", "0.2", "--orphan-grace-seconds", "0")


@pytest.fixture
def database(postgresql_server: PostgresqlServer) -> str:
    return postgresql_server.new_database()


@pytest.fixture
def daemons() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def _leads(daemon: Daemon) -> bool:
    return _LEADS in daemon.log()


def _is_stopped(daemon: Daemon) -> bool:
    return Path(f"/proc/{daemon.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def _rubbish(store: Store) -> set[str]:
    """Hidden checkpoints and orphans; returns the keys that have to go."""
    run = Run(store, "gpt", by="test")
    kept = write_checkpoint(store, step=1000, arrays={})
    before = {info.key for info in store.list("")}
    checkpoints = [write_checkpoint(store, step=step, arrays={}) for step in range(15)]
    for step in range(20, 35):
        write_rank(store, "gpt", Attempt(step, new_ulid(system_clock())), {}, rank=0, world_size=2)
    to_delete = {info.key for info in store.list("")} - before
    assert not hide(run, [c.attempt for c in checkpoints], "test", grace_s=0)
    assert [c.id for c in list_checkpoints(run)] == [kept.id]
    return to_delete


@pytest.mark.parametrize("place", ["after", "before"])
def test_a_leader_stopped_in_a_sweep_sweeps_nothing_when_it_wakes(
    store: Store, database: str, tmp_path: Path, daemons: ExitStack, place: str
) -> None:
    to_delete = _rubbish(store)
    notes = tmp_path / "deletes"

    def start(stop: str) -> Daemon:
        environment = {**os.environ, "NOTES": str(notes), "STOP": stop}
        program = ("-m", "tests.ckptd.housekeeping.counted_daemon")
        return daemons.enter_context(
            running_daemon(store.url, database, options=_OPTIONS, environment=environment, ready=False, program=program)
        )

    def deletes() -> list[tuple[int, bool, str]]:
        lines = (line.split() for line in notes.read_text().splitlines())
        return [(int(pid), there == "True", key) for pid, there, key in lines]

    first = start(place)
    wait_until(lambda: _is_stopped(first), "stopping in the middle of a sweep")
    done = len(deletes())
    assert 0 < done <= STOP_AT < len(to_delete)
    second = start("never")
    wait_until(lambda: _leads(second), "taking over")
    wait_until(lambda: to_delete.isdisjoint(info.key for info in store.list("gpt/")), "finishing the sweep")
    first.process.send_signal(signal.SIGCONT)
    wait_until(lambda: "to another daemon" in first.log(), "noticing that another one leads")
    wait_until(lambda: "another daemon is now the leader" in first.log(), "standing back")

    by_first = [there for pid, there, _ in deletes() if pid == first.process.pid][done:]
    # What was on its way when it was stopped is one delete, of what was gone already.
    assert by_first == ([] if place == "after" else [False])
    swept = Counter(key for _, there, key in deletes() if there)
    assert set(swept.values()) == {1}
    assert to_delete <= swept.keys()
    assert [c.step for c in list_checkpoints(Run(store, "gpt"))] == [1000]


def test_a_killed_leader_is_followed_within_the_lease(store: Store, database: str, daemons: ExitStack) -> None:
    write_checkpoint(store, step=1, arrays={})
    first = daemons.enter_context(running_daemon(store.url, database, options=_OPTIONS))
    wait_until(lambda: _leads(first), "leading")
    second = daemons.enter_context(running_daemon(store.url, database, options=_OPTIONS))
    time.sleep(LEASE_S)  # one that watches must not take over from one that lives
    assert not _leads(second) or "to another daemon" in first.log()
    first.kill()
    wait_until(lambda: _leads(second), "taking over")
    attempt = Attempt(3, new_ulid(system_clock()))
    write_rank(store, "gpt", attempt, {})
    wait_until(lambda: second.get("/v1/checkpoints/gpt@3").status_code == 200, "rolling forward")


def test_one_that_is_asked_to_stop_is_followed_at_once(store: Store, database: str, daemons: ExitStack) -> None:
    slow = ("--leader-lease-seconds", "60")
    first = daemons.enter_context(running_daemon(store.url, database, options=slow))
    wait_until(lambda: _leads(first), "leading")
    second = daemons.enter_context(running_daemon(store.url, database, options=("--leader-lease-seconds", "5")))
    assert first.stop() == 0
    wait_until(lambda: _leads(second), "taking over", 30)
