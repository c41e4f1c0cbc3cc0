from __future__ import annotations

import pytest
from sqlalchemy import text

from ckptd.index import Database, Index
from ckptd.index.listing import Listing
from ckptd.metrics import Metrics
from ckptd.services.catalog import Catalog, Freshness
from ckptd.services.store_sync import StoreSync
from ckptstore.clock import system_clock
from ckptstore.errors import StoreUnavailable, UnsupportedFormat
from ckptstore.stores import Store
from tests.support.checkpoints import write_checkpoint
from tests.support.stores import MovableClock


def test_what_is_believed_follows_the_last_listings() -> None:
    clock = MovableClock()
    freshness, failure = Freshness(clock, 60), StoreUnavailable("down")

    def believed(run: str | None, found: bool) -> bool:
        try:
            freshness.check(run, found)
        except StoreUnavailable:
            return False
        return True

    assert not believed("a", True)
    freshness.report(clock(), ["a", "b"], {"b": failure})
    assert believed("a", True)
    assert believed("a", False)
    assert not believed("b", True)
    assert not believed("b", False)
    assert not believed(None, True)
    freshness.report(clock(), ["a", "b"], {})
    assert believed(None, False)
    freshness.report_failure(failure)
    assert believed("b", True)
    assert not believed("b", False)
    assert freshness.problem() == "down"
    freshness.report(clock(), ["a", "b"], {})
    clock.advance(61)
    assert believed("a", True)
    assert not believed("a", False)
    assert freshness.lag_s() == pytest.approx(61, abs=30)


def test_a_newer_format_is_passed_on_instead_of_an_older_step() -> None:
    freshness = Freshness(system_clock, 60)
    freshness.report(system_clock(), ["a", "b"], {})
    freshness.report(system_clock(), ["a", "b"], {"a": UnsupportedFormat("version 9", "Upgrade ckptd")})
    with pytest.raises(UnsupportedFormat):
        freshness.check("a", True)
    freshness.check("b", True)


def test_no_answer_outlives_a_revision_that_goes_back(store: Store, database: Database) -> None:
    """After an asynchronous fail-over the last changes are gone, and their revisions come again with others."""
    freshness = Freshness(system_clock, 60)
    index = Index(database)
    catalog = Catalog(index, Listing(database), freshness, store.url)
    sync = StoreSync(store, index, freshness, Metrics(), system_clock)
    write_checkpoint(store, step=1)
    sync.run_once()
    behind = index.look()
    write_checkpoint(store, step=2)
    sync.run_once()
    assert catalog.latest("gpt").step == 2
    ahead = index.look()
    for revision in (behind, ahead):
        with database.write() as connection:
            connection.execute(text("DELETE FROM checkpoints WHERE step = 2"))
            connection.execute(text(f"UPDATE revision SET value = {revision}"))
        catalog.follow()
        assert catalog.latest("gpt").step == 1
