"""One daemon over a small store, shared by the tests that only read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckptstore.commits.catalog import Checkpoint
from ckptstore.stores import Store, open_store
from tests.support.checkpoints import write_checkpoint
from tests.support.daemons import Daemon, running_daemon


@dataclass(frozen=True, slots=True)
class Served:
    """A daemon, its store, and what is in it."""

    daemon: Daemon
    store: Store
    checkpoints: list[Checkpoint]
    """Of run gpt, steps 0, 10, 20, 30."""

    @property
    def newest(self) -> Checkpoint:
        """gpt@30."""
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
