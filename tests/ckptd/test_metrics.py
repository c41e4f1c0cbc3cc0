from __future__ import annotations

from ckptapi.client import DaemonClient
from ckptstore.stores import Store
from tests.support.checkpoints import write_checkpoint
from tests.support.daemons import Daemon
from tests.support.waiting import wait_until


def test_metrics_name_the_newest_checkpoint(store: Store, daemon: Daemon, client: DaemonClient) -> None:
    client.notify("gpt", write_checkpoint(store, step=40).attempt)
    text = daemon.get("/metrics").text
    assert 'ckptd_last_committed_step{run="gpt"} 40.0' in text
    age = next(line for line in text.splitlines() if line.startswith('ckptd_checkpoint_age_seconds{run="gpt"}'))
    assert 0 <= float(age.split()[-1]) < 60
    assert "ckptd_index_lag_seconds " in text
    wait_until(lambda: 'route="/metrics",status="200"' in daemon.get("/metrics").text, "counting a request")
