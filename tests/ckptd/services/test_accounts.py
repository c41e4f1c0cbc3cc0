from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from ckptd.index import Database, Index, Listing
from ckptd.metrics import Metrics
from ckptd.services import Accounts
from ckptd.services.catalog import Catalog, Freshness
from ckptd.services.store_sync import StoreSync
from ckptstore.analysis.goodput import SILENT_S
from ckptstore.clock import system_clock
from ckptstore.format.documents import FORMAT
from ckptstore.format.parsing import seal
from ckptstore.format.records import LOCAL_ONLY, Heartbeat, LocalOnly, TrainerEnd
from ckptstore.names import new_ulid
from ckptstore.run import Run
from ckptstore.stores import Store, open_store
from tests.support.checkpoints import write_checkpoint
from tests.support.command_line import invoke
from tests.support.daemons import Daemon, running_daemon
from tests.support.stores import MovableClock
from tests.support.waiting import wait_until


def test_a_run_without_a_usable_checkpoint_does_not_stop_other_accounts(store: Store, database: Database) -> None:
    index, freshness = Index(database), Freshness(system_clock, 60)
    store_sync = StoreSync(store, index, freshness, Metrics(), system_clock)
    accounts = Accounts(store, Catalog(index, Listing(database), freshness, store.url), MovableClock(2 * SILENT_S))
    for run in "ab":
        write_checkpoint(store, run, step=1, arrays={})
    store_sync.run_once()
    accounts.refresh()
    assert set(accounts.known()) == {"a", "b"}

    [damaged] = [info.key for info in store.list(Run(store, "a").keys.commits)]
    store.put(damaged, b"noise")
    write_checkpoint(store, "b", step=2, arrays={}, clock=MovableClock(60.0))
    store_sync.run_once()
    accounts.refresh()
    assert (set(accounts.known()), accounts.known()["b"].step) == ({"a", "b"}, 2)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Of a run that has ended with checkpoints in a local tier, and one that replicated all."""
    store, now = open_store(str(tmp_path_factory.mktemp("local") / "store")), system_clock()
    for name, local in (("gpt", LocalOnly(3, 3000, now - 7300, now - 7200, 9)), ("bert", LocalOnly(0, 0, None, now))):
        write_checkpoint(store, name, 5)
        run = Run(store, name)
        heartbeat = Heartbeat(
            format=FORMAT, kind="heartbeat", run=name, id=new_ulid(now - 9000), by="me", began_at=now - 9000,
            trains_at=now - 9000, restored_s=0.0, parent=None, generation=None, at=[], step=[], stalled_s=[],
            slowed_s=[], ended=TrainerEnd.DIED, ended_at=now - 7200,
            extensions={LOCAL_ONLY: msgspec.to_builtins(local)},
        )  # fmt: skip
        store.put(run.keys.heartbeat(heartbeat.id), seal(heartbeat))
    with running_daemon(store.url) as daemon:
        accounts = [f"/v1/goodput?run={name}" for name in ("gpt", "bert")]  # the daemon's own look comes once a minute
        wait_until(lambda: all(daemon.get(account).status_code == 200 for account in accounts), "the accounts")
        yield daemon


def test_metrics_have_what_is_local_only_and_the_age_of_the_report(daemon: Daemon) -> None:
    lines = [
        line.rpartition(" ")
        for line in daemon.get("/metrics").text.splitlines()
        if "ckptd_replication_queue" in line or "ckptd_local" in line
    ]
    found = {name: float(value) for name, _, value in lines if not name.startswith("#")}
    assert found['ckptd_replication_queue_checkpoints{run="gpt"}'] == 3
    assert found['ckptd_replication_queue_bytes{run="gpt"}'] == 3000
    assert found['ckptd_local_newest_step{run="gpt"}'] == 9
    assert found['ckptd_replication_queue_age_seconds{run="gpt"}'] >= 7300
    assert (
        7200
        <= found['ckptd_replication_queue_report_age_seconds{run="gpt"}']
        < found['ckptd_replication_queue_age_seconds{run="gpt"}']
    )
    assert {name: value for name, value in found.items() if "bert" in name} == {
        'ckptd_replication_queue_checkpoints{run="bert"}': 0, 'ckptd_replication_queue_bytes{run="bert"}': 0
    }  # fmt: skip


def test_pages_and_the_command_line_show_what_is_local_only(daemon: Daemon) -> None:
    shown = "3 checkpoints local only (2.9 KiB), the oldest for 2h 0"
    assert shown in daemon.get("/runs/gpt").text
    assert "local only" not in daemon.get("/runs/bert").text
    rows = daemon.get("/").text.split("<tr>")
    assert shown in next(row for row in rows if "/runs/gpt" in row)
    assert "local only" not in next(row for row in rows if "/runs/bert" in row)
    figure = daemon.get("/runs/gpt").text.partition("newest local")[2]
    assert figure.index("step 9") < figure.index("local only")
    assert "newest local  step 9" in invoke("goodput", "gpt", "--url", daemon.url).stdout
    assert "local only" in invoke("goodput", "gpt", "--url", daemon.url).stdout
    assert "local only" not in invoke("goodput", "bert", "--url", daemon.url).stdout
