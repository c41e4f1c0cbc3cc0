"""A remote S3 service that is busy, silent or refuses the credentials: saves are local at once, and remote when it
answers."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt import Checkpointer
from ckptstore.commits.catalog import list_checkpoints
from ckptstore.errors import StoreReadOnly
from ckptstore.run import Run
from ckptstore.stores import open_store
from ckptstore.tiers.replication import replication_queue, unreplicable
from tests.ckptstore.proxies import LossyProxy, lossy_proxy
from tests.support import seaweed
from tests.support.seaweed import BUCKET, S3Service
from tests.support.waiting import wait_until

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
def test_saves_are_local_and_the_replication_queue_is_replicated_in_order(
    away: Any, remote: Remote, proxy: LossyProxy
) -> None:
    def switch(off: bool) -> None:
        proxy.away = away if off and away != "forbidden" else None
        proxy.refuses = lambda _: off and away == "forbidden"

    with remote.start() as checkpointer:
        switch(off=True)
        for step in (1, 2, 3):
            save(checkpointer, step)
            assert len(replication_queue(remote.local).attempts) == step
        wait_until(lambda: checkpointer.counters.local_only == 3)
        assert remote.remote_steps() == []
        switch(off=False)
    assert remote.remote_steps() == [3, 2, 1]
    times = [c.committed_at for c in list_checkpoints(remote.remote)]
    assert times == sorted(times, reverse=True), "in order"
    assert (replication_queue(remote.local).attempts, unreplicable(remote.local)) == ((), set())


def test_a_saver_ends_though_the_remote_store_never_answers(remote: Remote, proxy: LossyProxy) -> None:
    """One layer repeats a request: three layers of tries and their time-outs would be minutes."""
    proxy.away = "silent"
    with remote.start() as checkpointer:
        save(checkpointer, 1)
    assert len(replication_queue(remote.local).attempts) == 1
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


def test_without_a_local_tier_missing_credentials_fail_at_once(
    remote: Remote, proxy: LossyProxy, credentials: Path
) -> None:
    """A retry for ten minutes would end in the time limit of the test."""
    options = {"endpoint_url": proxy.url, **IMPATIENT}
    for knobs in ({"options": options}, {}):
        proxy.refuses = lambda _: True
        with remote.start(local=None, retry_s=600.0, **knobs) as checkpointer:
            with pytest.raises(StoreReadOnly, match="cannot") as caught:
                checkpointer.save(nn.Linear(2, 2), None, 1)
            assert "credentials" in caught.value.hint
