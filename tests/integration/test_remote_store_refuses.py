"""A remote S3 service that is busy, silent or refuses the credentials: saves are local at once, and remote when it
answers."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt import Checkpointer
from ckptstore.commits.catalog import Checkpoint, State, list_checkpoints
from ckptstore.commits.heartbeats import read_heartbeats
from ckptstore.errors import CkptError, StoreReadOnly
from ckptstore.format.records import LOCAL_ONLY, LocalOnly
from ckptstore.reading.source import StoreSource
from ckptstore.reading.verify import verify
from ckptstore.run import Run
from ckptstore.stores import open_store
from ckptstore.tiers.replication import replication_queue, unreplicable
from tests.ckptstore.proxies import LossyProxy, lossy_proxy
from tests.support import seaweed
from tests.support.command_line import invoke
from tests.support.seaweed import BUCKET, RestartableService, S3Service
from tests.support.trainers import Trainer, is_alive
from tests.support.waiting import present, wait_until

IMPATIENT = {"config_kwargs": {"connect_timeout": 0.5, "read_timeout": 0.5}}


class Remote:
    """A place in the remote service behind a proxy, and a local folder."""

    def __init__(self, folder: Path, service: S3Service, proxy: LossyProxy) -> None:
        self.url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
        self.options = {**service.options, "endpoint_url": proxy.url, **IMPATIENT}
        self.local = Run(open_store(str(folder / "local")), "gpt")
        self.remote = Run(open_store(self.url, service.options), "gpt")

    def start(self, **knobs: Any) -> Checkpointer:
        given: dict[str, Any] = {"local": self.local.store.url, "local_keep": 1, "options": self.options}
        given |= {"retry_s": 0.2, "writer": "thread"} | knobs
        return Checkpointer(self.url, run="gpt", **given)

    def remote_steps(self) -> list[int]:
        return [c.step for c in list_checkpoints(self.remote)]


@pytest.fixture
def proxy(s3_service: S3Service) -> Iterator[LossyProxy]:
    with lossy_proxy(s3_service.endpoint) as proxy:
        yield proxy


@pytest.fixture
def remote(tmp_path: Path, s3_service: S3Service, proxy: LossyProxy) -> Remote:
    return Remote(tmp_path, s3_service, proxy)


def save(checkpointer: Checkpointer, step: int) -> None:
    """Durable locally on return."""
    saved = checkpointer.save(nn.ParameterDict({"w": torch.full((1000,), float(step))}), None, step)
    assert (saved.step, saved.tiers) == (step, ("local",))


@pytest.mark.parametrize("away", ["busy", "silent", "forbidden"])
def test_saves_are_local_and_the_queue_is_replicated_in_order(away: Any, remote: Remote, proxy: LossyProxy) -> None:
    def switch(off: bool) -> None:
        proxy.away = away if off and away != "forbidden" else None
        proxy.refuses = lambda _: off and away == "forbidden"

    # Once it answers, one try has to be enough, on a slow machine too.
    remote.options["config_kwargs"] = {"connect_timeout": 0.5, "read_timeout": 3.0 if away == "silent" else 60.0}
    with remote.start() as checkpointer:
        switch(off=True)
        for step in (1, 2, 3):
            save(checkpointer, step)
            assert len(replication_queue(remote.local, {})) == step
        wait_until(lambda: checkpointer.counters.local_only == 3)
        assert remote.remote_steps() == []
        switch(off=False)
    assert remote.remote_steps() == [3, 2, 1]
    times = [c.committed_at for c in list_checkpoints(remote.remote)]
    assert times == sorted(times, reverse=True), "in order"
    assert (replication_queue(remote.local, {}), unreplicable(remote.local)) == ([], set())


def test_a_saver_ends_though_the_remote_store_never_answers(remote: Remote, proxy: LossyProxy) -> None:
    """One layer repeats a request: three layers of tries and their time-outs would be minutes."""
    proxy.away = "silent"
    with remote.start() as checkpointer:
        save(checkpointer, 1)
    assert len(replication_queue(remote.local, {})) == 1
    assert len(proxy.requests) <= 20


def test_a_read_from_a_store_that_never_answers_is_tried_once(remote: Remote, proxy: LossyProxy) -> None:
    proxy.away = "silent"
    for retried, tries in ((True, 1), (False, 6)):
        proxy.arm(None)
        with pytest.raises(Exception, match="cannot read"):
            open_store(remote.url, remote.options, retried=retried).get("gpt/a")
        assert len(proxy.requests) == tries


@pytest.fixture
def credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where credentials are looked for; it does not exist."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    return tmp_path / "credentials"


def write(credentials: Path, secret: str) -> None:
    credentials.write_text(f"[default]\naws_access_key_id={seaweed.ACCESS_KEY}\naws_secret_access_key={secret}\n")


@pytest.mark.parametrize("before", ["none", "refused"])
def test_credentials_that_are_renewed_are_used(
    before: str, remote: Remote, proxy: LossyProxy, credentials: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if before == "refused":
        write(credentials, "no longer this one")
    remote.options = {"endpoint_url": proxy.url, **IMPATIENT}
    with remote.start() as checkpointer:
        save(checkpointer, 1)
        wait_until(lambda: "checkpoints stay local until" in caplog.text)
        write(credentials, seaweed.SECRET_KEY)
        wait_until(lambda: remote.remote_steps() == [1])
        save(checkpointer, 2)
    assert remote.remote_steps() == [2, 1]


def test_without_a_local_tier_no_credentials_fail_at_once(remote: Remote, proxy: LossyProxy, credentials: Path) -> None:
    """A retry for ten minutes would end in the time limit of the test."""
    options = {"endpoint_url": proxy.url, **IMPATIENT}
    for knobs in ({"options": options}, {}):
        proxy.refuses = lambda _: True
        with remote.start(local=None, retry_s=600.0, **knobs) as checkpointer:
            with pytest.raises(StoreReadOnly, match="cannot") as caught:
                checkpointer.save(nn.Linear(2, 2), None, 1)
            assert "credentials" in caught.value.hint


URL = f"s3://{seaweed.BUCKET}/runs"
AWAY_S = float(os.environ.get("CKPTD_AWAY_SECONDS", "0"))
LIMIT_S = 180.0
PACE_S = max(0.2, AWAY_S / 1000)
"""Seconds between saves: the test also waits until all are replicated."""


@contextmanager
def training(local: Path, service: RestartableService) -> Iterator[Trainer]:
    environment = {**os.environ, **service.where.environment, "PACE_S": str(PACE_S)}
    trainer = Trainer(URL, str(local), environment)
    try:
        yield trainer
    finally:
        trainer.kill()


def end(saver: int) -> None:
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
    assert replication_queue(local, {}) == []
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
        waiting = replication_queue(local, {})
        assert len(waiting) >= 5
        assert list_checkpoints(local)[0].step >= trainer.saved
        with training(tmp_path / "local", service) as second:
            wait_until(lambda: second.saved >= trainer.saved + 3, deadline_s=LIMIT_S)
            assert second.resumed is not None
            assert second.resumed >= trainer.saved  # from what is local only
            drained = invoke("drain", "kill", "--timeout", "0", "-o", "json")
            assert drained.code == 3
            [left] = drained.json["left"]
            assert left["local_only"] >= len(waiting) + 1
            assert left["local_only_since"] == min(c.committed_at for c in waiting)
            service.start()
            wait_until(lambda: len(there()) > 2, deadline_s=LIMIT_S)
        # The saver outlives the trainer, works on the replication queue, and ends.
        wait_until(lambda: invoke("drain", "kill", "--timeout", "60").code == 0, deadline_s=LIMIT_S + 3 * AWAY_S)
        wait_until(lambda: not is_alive(second.saver), deadline_s=LIMIT_S)
        reported = present(read_heartbeats(remote)[-1].extension(LOCAL_ONLY, LocalOnly))
        assert (reported.checkpoints, reported.since) == (0, None)
        check_that_all_is_remote(local, remote, second.saved)
    finally:
        service.stop()
