"""A listing that fails or changes midway removes nothing from the index."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from ckptapi.listing import Filter, Sort
from ckptd.index import Database, Index, Listing
from ckptd.metrics import Metrics
from ckptd.services.catalog import Freshness
from ckptd.services.store_sync import StoreSync
from ckptstore.clock import system_clock
from ckptstore.commits.catalog import Checkpoint, list_checkpoints
from ckptstore.errors import StoreUnavailable
from ckptstore.retention.deletion import delete_checkpoint
from ckptstore.run import Run
from ckptstore.stores import Store
from tests.conftest import DATABASE_KINDS
from tests.support.checkpoints import write_checkpoint
from tests.support.stores import Faults, FaultyStore

_T = TypeVar("_T")
on_both = pytest.mark.parametrize("db_url", DATABASE_KINDS, indirect=True)


@pytest.fixture
def database(db_url: str) -> Iterator[Database]:
    database = Database(db_url, 20)
    yield database
    database.close()


def _all(database: Database, run: str | None = None) -> list[Checkpoint]:
    return Listing(database).page(Filter(run=run), Sort.RUN, None, 100).checkpoints


def _store_sync(store: Store, index: Index) -> tuple[StoreSync, Freshness]:
    freshness = Freshness(system_clock, 60)
    return StoreSync(store, index, freshness, Metrics(), system_clock), freshness


@on_both
def test_a_round_that_fails_at_any_call_removes_nothing(store: Store, database: Database) -> None:
    for step in (1, 1, 2):
        write_checkpoint(store, step=step, arrays={})
    write_checkpoint(store, "bert", 1, arrays={})
    index = Index(database)
    counting = Faults()
    _store_sync(FaultyStore(store, counting), index)[0].run_once()
    before = _all(database)
    assert before == [*list_checkpoints(Run(store, "bert")), *list_checkpoints(Run(store, "gpt"))]
    assert len(counting.calls) > 8
    for call in range(len(counting.calls)):
        for reread in (False, True):
            store_sync, freshness = _store_sync(FaultyStore(store, Faults(fail_at=call)), index)
            if reread:
                try:
                    store_sync.reindex()
                except StoreUnavailable:
                    pass
            else:
                store_sync.run_once()
            assert _all(database) == before, call
    store_sync, freshness = _store_sync(store, index)
    store_sync.run_once()
    assert freshness.problem() == ""


def test_a_volume_unmounted_between_two_listings_is_no_deletion(
    store: Store, database: Database, tmp_path: Path
) -> None:
    write_checkpoint(store, arrays={})
    index = Index(database)
    _store_sync(store, index)[0].run_once()
    before = _all(database)

    @dataclass
    class Unmounting(Faults):
        def around(self, what: str, call: Callable[[], _T]) -> _T:
            if what == "list gpt/commits/" and not (tmp_path / "away").exists():
                (tmp_path / "store").rename(tmp_path / "away")
                (tmp_path / "store").mkdir()  # the mount point remains
            return super().around(what, call)

    store_sync, _ = _store_sync(FaultyStore(store, Unmounting()), index)
    with pytest.raises(StoreUnavailable, match="while it was listed"):
        store_sync.sync_run("gpt")
    assert _all(database) == before


@on_both
def test_outcomes_are_read_once(store: Store, database: Database) -> None:
    kept = [write_checkpoint(store, step=step, arrays={}) for step in range(5)]
    counting = Faults()
    store_sync, _ = _store_sync(FaultyStore(store, counting), Index(database))
    store_sync.run_once()
    delete_checkpoint(Run(store, kept[0].run), kept[0].attempt, "test")
    counting.calls.clear()
    for _ in range(3):
        store_sync.run_once()
    assert [call for call in counting.calls if call.startswith("get")] == []
    assert len(_all(database, "gpt")) == 4
