from __future__ import annotations

from collections.abc import Iterator

import pytest

from ckptd.index import Database, Index, Listing
from ckptd.metrics import Metrics
from ckptd.services import Accounts
from ckptd.services.catalog import Catalog
from ckptd.services.freshness import Freshness
from ckptd.services.store_sync import StoreSync
from ckptstore.clock import system_clock
from ckptstore.commits.heartbeats import SILENT_S
from ckptstore.run import Run
from ckptstore.stores import Store
from tests.support.checkpoints import write_checkpoint
from tests.support.stores import MovableClock


@pytest.fixture
def database(db_url: str) -> Iterator[Database]:
    database = Database(db_url, 20)
    yield database
    database.close()


def test_a_run_without_a_usable_checkpoint_does_not_stop_the_accounts_of_others(
    store: Store, database: Database
) -> None:
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
    assert set(accounts.known()) == {"a", "b"}
    assert accounts.known()["b"].step == 2
