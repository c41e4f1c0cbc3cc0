"""Metrics of checkpoints and requests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ckptapi.client import DaemonClient
from ckptstore.stores import Store
from tests.support.checkpoints import write_checkpoint
from tests.support.daemons import Daemon, running_daemon
from tests.support.waiting import wait_until

# It polls once, at its start: later changes come by notification.
_NEVER_POLLS = ("--poll-seconds", "3600")


@pytest.fixture
def daemon(store: Store) -> Iterator[Daemon]:
    with running_daemon(store.url, options=_NEVER_POLLS) as daemon:
        yield daemon


@pytest.fixture
def client(daemon: Daemon) -> Iterator[DaemonClient]:
    with daemon.client() as client:
        yield client


def test_metrics_name_the_newest_checkpoint(store: Store, daemon: Daemon, client: DaemonClient) -> None:
    client.notify("gpt", write_checkpoint(store, step=40).attempt)
    text = daemon.get("/metrics").text
    assert 'ckptd_last_committed_step{run="gpt"} 40.0' in text
    age = next(line for line in text.splitlines() if line.startswith('ckptd_checkpoint_age_seconds{run="gpt"}'))
    assert 0 <= float(age.split()[-1]) < 60
    assert "ckptd_index_lag_seconds " in text
    wait_until(lambda: 'route="/metrics",status="200"' in daemon.get("/metrics").text, "counting a request")
