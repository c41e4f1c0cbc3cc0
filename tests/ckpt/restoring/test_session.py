from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ckpt.config import Config
from ckpt.restoring.session import RestoreSession
from ckptapi.bodies import Phase, RestoreBody, RestoreState, RestoreStatus
from ckptapi.client import DaemonClient
from ckptstore import names
from ckptstore.clock import system_clock
from ckptstore.errors import DaemonUnavailable
from ckptstore.names import RunKeys
from ckptstore.reading.source import StoreSource
from ckptstore.retention.scrubbing import scrub
from ckptstore.stores import Store, open_store
from tests.ckpt.restoring.replicas import RUN
from tests.support.command_line import invoke
from tests.support.daemons import Daemon, caching_daemon, running_daemon
from tests.support.parallel.runner import Scenario, run_scenario
from tests.support.stores import CountingStore

_STEPS = [1, 2]


@dataclass
class Job:
    folder: Path
    digest: str

    @property
    def store(self) -> Store:
        return open_store(str(self.folder / "store"))

    def restore(self, **arguments: Any) -> list[dict[str, Any]]:
        place = self.folder / f"restore-{len(list(self.folder.iterdir()))}"
        place.mkdir()
        arguments = {"store": str(self.folder / "store"), "daemon": None, "replica_reads": "auto"} | arguments
        return run_scenario(Scenario("tests.ckpt.restoring.replicas:restore", 2, arguments), place)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("sessions")
    arguments = {"store": str(folder / "store"), "steps": _STEPS}
    digests = run_scenario(Scenario("tests.ckpt.restoring.replicas:save", 2, arguments), folder / "save")
    return Job(folder, digests[0])


@pytest.fixture(scope="module")
def daemon(job: Job) -> Iterator[Daemon]:
    with running_daemon(job.store.url) as daemon:
        yield daemon


def _sessions(daemon: Daemon) -> list[RestoreBody]:
    with daemon.client() as client:
        return [client.restore_session(found.id) for found in client.restore_sessions(RUN)]


def test_a_session_ends_restored_and_reports_what_each_rank_fetched(job: Job, daemon: Daemon) -> None:
    results = job.restore(daemon=daemon.url)
    assert [result["digest"] for result in results] == [job.digest] * 2
    assert [result["log"] for result in results] == [[], []]
    session = _sessions(daemon)[0]
    assert (session.state, session.num_restored, session.world_size) == (RestoreState.RESTORED, 2, 2)
    assert results[0]["restored"] == [session.checkpoint.id, 0]
    assert session.ranks is not None
    for rank in session.ranks:
        assert rank.done_bytes == rank.total_bytes > 16_000_000
    line = invoke("restores", RUN, "--url", daemon.url).stdout.splitlines()[1].split()
    assert line[:5] == [session.id, f"{RUN}@2", "restored", "2/2", "100%"]


def test_a_rank_that_fails_ends_the_session_with_its_error(job: Job, daemon: Daemon) -> None:
    results = job.restore(daemon=daemon.url, layers_of_rank_1=7)
    assert [result["error"][0] for result in results] == ["state_mismatch"] * 2
    session = _sessions(daemon)[0]
    assert session.state is RestoreState.FAILED
    assert "the checkpoint does not fit" in session.problem


def test_a_daemon_that_is_down_is_warned_of_and_done_without(job: Job) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        results = job.restore(daemon=f"http://127.0.0.1:{taken.getsockname()[1]}", replica_reads="daemon")
    for result in results:
        assert result["digest"] == job.digest
        assert "restoring without a session at the daemon" in result["log"][0]
        assert "reading straight from the store" in result["log"][1]


def test_a_last_report_that_was_lost_is_sent_again(job: Job, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that was away for it, and is back, would wait for this rank until the rank counts as lost."""
    loses, report = iter([True]), DaemonClient.report_restore

    def lossy(self: DaemonClient, id: str, rank: int, phase: Phase, *counts: Any) -> RestoreStatus:
        if phase is Phase.RESTORED and next(loses, False):
            raise DaemonUnavailable("the connection was reset", "")
        return report(self, id, rank, phase, *counts)

    monkeypatch.setattr(DaemonClient, "report_restore", lossy)
    session = RestoreSession(Config(run=RUN, daemon=daemon.url, peer_timeout_s=5.0), 0, 1)
    session.join(StoreSource(job.store).latest(RUN), "lost")
    assert session.joined
    session.end(Phase.RESTORED)
    assert _sessions(daemon)[0].state is RestoreState.RESTORED


def test_a_corrupt_checkpoint_fails_its_session_and_the_next_one_is_restored(job: Job, daemon: Daemon) -> None:
    source = StoreSource(job.store)
    newest = source.latest(RUN)
    key = RunKeys(RUN).shard(newest.attempt, names.shard_name(0))
    intact = job.store.get(key)
    job.store.put(key, intact[:1000] + bytes([intact[1000] ^ 1]) + intact[1001:])
    try:
        results = job.restore(daemon=daemon.url)
    finally:
        job.store.put(key, intact)
        (repaired,) = scrub(job.store, [newest], "test", system_clock)
    assert repaired.ok
    older = source.checkpoints(RUN)[1]
    for rank, result in enumerate(results):
        assert (result["restored"], [id for id, _ in result["skipped"]]) == ([older.id, rank], [newest.id])
    second, first = _sessions(daemon)[:2]
    assert (second.checkpoint.id, second.state) == (older.id, RestoreState.RESTORED)
    assert (first.checkpoint.id, first.state) == (newest.id, RestoreState.FAILED)
    assert "does not match its checksum" in first.problem


class LyingOnce(CountingStore):
    """Gives wrong bytes of the first stretch of a shard that is read, the first time."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._lies = iter([True])

    def read_into(self, key: str, offset: int, buffer: memoryview) -> int:
        count = super().read_into(key, offset, buffer)
        if key.endswith(".ckpt") and next(self._lies, False):  # several ranks may be reading at once
            buffer[count // 2] ^= 1
        return count


@pytest.mark.parametrize("direct", [True, False], ids=["with a store", "daemon only"])
def test_wrong_bytes_in_the_cache_are_read_again_past_it(job: Job, tmp_path: Path, direct: bool) -> None:
    with caching_daemon(LyingOnce(job.store), tmp_path) as served:
        given = {"daemon": served, "replica_reads": "daemon"} if direct else {"store": None, "daemon": served}
        results = job.restore(**given)
    for result in results:
        assert (result["digest"], result["skipped"]) == (job.digest, [])
        assert any("reading again, bypassing the daemon's cache" in line for line in result["log"])
