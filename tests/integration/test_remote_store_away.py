"""The remote store, a real S3 service, is killed under load, and so are trainer and saver: nothing that was saved is
lost.

CKPTD_AWAY_SECONDS: how long it is away at least.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from ckptstore.commits.catalog import Checkpoint, State, list_checkpoints
from ckptstore.commits.heartbeats import read_heartbeats
from ckptstore.errors import CkptError
from ckptstore.format.records import LOCAL_ONLY, LocalOnly
from ckptstore.reading.source import StoreSource
from ckptstore.reading.verify import verify
from ckptstore.run import Run
from ckptstore.stores import open_store
from ckptstore.tiers.replication import replication_queue
from tests.support import seaweed
from tests.support.command_line import invoke
from tests.support.seaweed import RestartableService
from tests.support.trainers import Trainer, is_alive
from tests.support.waiting import wait_until

URL = f"s3://{seaweed.BUCKET}/runs"
AWAY_S = float(os.environ.get("CKPTD_AWAY_SECONDS", "0"))
LIMIT_S = 180.0
PACE_S = max(0.05, AWAY_S / 1000)
"""Seconds between saves: the test also waits until all are replicated."""


@contextmanager
def training(local: Path, service: RestartableService) -> Iterator[Trainer]:
    environment = {**os.environ, **service.where.environment, "PACE_S": str(PACE_S)}
    trainer = Trainer(URL, str(local), "tests.support.tiered_train", environment)
    try:
        yield trainer
    finally:
        trainer.kill()


def end(saver: int) -> None:
    """SIGKILL, and wait until it is gone."""
    with suppress(ProcessLookupError):
        os.kill(saver, signal.SIGKILL)
    wait_until(lambda: not is_alive(saver))


def check_that_all_is_remote(local: Run, remote: Run, at_least: int) -> None:
    """Every step once, in order, up to `at_least` or a later one; and the local tier is trimmed."""
    listed = list_checkpoints(remote)
    done = {c.step: c for c in listed}
    assert set(done) == set(range(1, max(done) + 1)), "none is lost"
    assert max(done) >= at_least
    assert len(listed) == len(done), "none is there twice"
    assert all(c.state is State.COMMITTED for c in listed)
    times = [done[step].committed_at for step in sorted(done)]
    assert times == sorted(times), "in order"
    assert all(verify(StoreSource(remote.store), c).ok for c in listed)
    assert replication_queue(local).attempts == ()
    wait_until(lambda: [c.step for c in list_checkpoints(local)] == [max(done)])


@pytest.mark.slow
@pytest.mark.timeout(600 + 4 * AWAY_S)
def test_all_is_local_at_once_and_remote_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("service", "local", "tmp"):
        (tmp_path / folder).mkdir()
    service = RestartableService(tmp_path / "service")
    local = Run(open_store(str(tmp_path / "local")), "kill")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))  # for the notes of these savers only
    remote = Run(open_store(URL, service.where.options), "kill")

    def there() -> dict[int, Checkpoint]:
        with suppress(CkptError):
            return {c.step: c for c in list_checkpoints(remote)}
        return {}

    service.start()
    try:
        seaweed._file_system(service.where).mkdir(seaweed.BUCKET)
        with training(tmp_path / "local", service) as trainer:
            wait_until(lambda: len(there()) >= 2, deadline_s=LIMIT_S)
            service.stop()
            since, seen = time.monotonic(), trainer.saved
            wait_until(lambda: trainer.saved >= seen + 5, deadline_s=LIMIT_S)
            wait_until(lambda: time.monotonic() >= since + AWAY_S, deadline_s=LIMIT_S + AWAY_S)
            first = trainer.saver
        end(first)  # the trainer is killed, and then its saver
        waiting = replication_queue(local)
        assert len(waiting.attempts) >= 5
        assert list_checkpoints(local)[0].step >= trainer.saved
        with training(tmp_path / "local", service) as second:
            wait_until(lambda: second.saved >= trainer.saved + 3, deadline_s=LIMIT_S)
            assert second.resumed is not None
            assert second.resumed >= trainer.saved  # from what is local only
            drained = invoke("drain", "kill", "--timeout", "0", "-o", "json")
            assert drained.code == 3
            [left] = drained.json["left"]
            assert left["local_only"] >= len(waiting.attempts) + 1
            assert left["local_only_since"] == waiting.since
            service.start()
            wait_until(lambda: len(there()) > 2, deadline_s=LIMIT_S)
        # The saver outlives the trainer, works on the replication queue, and ends.
        wait_until(lambda: invoke("drain", "kill", "--timeout", "60").code == 0, deadline_s=LIMIT_S + 3 * AWAY_S)
        wait_until(lambda: not is_alive(second.saver), deadline_s=LIMIT_S)
        reported = read_heartbeats(remote)[-1].extension(LOCAL_ONLY, LocalOnly)
        assert reported is not None
        assert (reported.checkpoints, reported.since) == (0, None)
        check_that_all_is_remote(local, remote, second.saved)
    finally:
        service.stop()
