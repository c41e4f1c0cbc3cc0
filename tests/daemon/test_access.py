"""The token."""

from __future__ import annotations

import os
from collections.abc import Iterator

import httpx
import pytest

from ckptstore import wire
from ckptstore.errors import CkptError
from ckptstore.stores import Store
from tests.support.checkpoints import write_checkpoint
from tests.support.daemons import Daemon, running_daemon, wait_until

_TOKEN = "correct horse"


@pytest.fixture
def daemon(store: Store) -> Iterator[Daemon]:
    write_checkpoint(store, step=1)
    environment = {**os.environ, "CKPTD_TOKEN": _TOKEN}
    # With a token it may listen beyond loopback.
    with running_daemon(store.url, options=("--host", "0.0.0.0"), environment=environment) as daemon:
        yield daemon


def test_everything_but_the_probes_asks_for_the_token(daemon: Daemon) -> None:
    for path in ("/livez", "/readyz", "/metrics"):
        assert daemon.get(path).status_code == 200
    for path in ("/checkpoints/latest", wire.RUNS, wire.CHECKPOINTS, "/openapi.json", "/nope", "/livez/", "//livez"):
        for given in ("", _TOKEN, f"Bearer {_TOKEN}x", "Bearer", f"bearer  {_TOKEN}", "Basic eDp5"):
            answer = daemon.get(path, headers={"Authorization": given} if given else {})
            assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized"), (path, given)
            assert answer.headers["www-authenticate"] == "Bearer"
    for path in (wire.PRUNE, wire.NOTIFY, wire.REINDEX, wire.LEASES):
        assert httpx.post(daemon.url + path, json={}).status_code == 401


def test_the_client_sends_it(daemon: Daemon) -> None:
    with daemon.client(_TOKEN) as client:
        assert client.latest().step == 1
    with daemon.client("wrong") as client, pytest.raises(CkptError, match="token"):
        client.latest()


def test_the_token_is_not_in_the_log(daemon: Daemon) -> None:
    daemon.get("/checkpoints/latest", headers={"Authorization": f"Bearer {_TOKEN}"})
    wait_until(lambda: "/checkpoints/latest 200" in daemon.log(), "the log line")
    assert _TOKEN not in daemon.log()
