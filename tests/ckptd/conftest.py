"""A daemon over a small store, shared by the tests that only read; one for each test that changes it; the index."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckptapi.client import DaemonClient
from ckptd.index import Database
from ckptstore.commits.catalog import Checkpoint
from ckptstore.stores import Store, open_store
from tests.support.checkpoints import write_checkpoint
from tests.support.daemons import Daemon, running_daemon
from tests.support.postgresql import PostgresqlServer


@dataclass(frozen=True, slots=True)
class Served:
    """A daemon, its store, and what is in it."""

    daemon: Daemon
    store: Store
    checkpoints: list[Checkpoint]
    """Of run gpt, steps 0, 10, 20, 30."""

    @property
    def newest(self) -> Checkpoint:
        return self.checkpoints[-1]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A daemon that no test changes."""
    folder: Path = tmp_path_factory.mktemp("served")
    store = open_store(str(folder / "store"))
    checkpoints = [write_checkpoint(store, "gpt", step, metrics={"loss": 1 / (step + 1)}) for step in (0, 10, 20, 30)]
    write_checkpoint(store, "bert", 5)
    with running_daemon(store.url) as daemon:
        yield Served(daemon, store, checkpoints)


@pytest.fixture
def daemon(store: Store) -> Iterator[Daemon]:
    """It polls once, at its start: later changes come by notification."""
    with running_daemon(store.url, options=("--poll-seconds", "3600")) as daemon:
        yield daemon


@pytest.fixture
def client(daemon: Daemon) -> Iterator[DaemonClient]:
    with daemon.client() as client:
        yield client


@pytest.fixture
def database(db_url: str) -> Iterator[Database]:
    database = Database(db_url, 20)
    yield database
    database.close()


@pytest.fixture
def postgresql_database(postgresql_server: PostgresqlServer) -> str:
    return postgresql_server.new_database()
