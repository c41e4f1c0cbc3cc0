"""A store with two runs, as an operator would find it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptstore.clock import system_clock
from ckptstore.names import RunKeys
from ckptstore.stores import Store, open_store
from tests.support.checkpoints import write_checkpoint
from tests.support.daemons import Daemon, running_daemon
from tests.support.entries import ENTRIES, TREES, write_entries


class Calendar:
    """A clock that goes on by half a second at every look."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        self.now += 0.5
        return self.now


def fill(folder: Path) -> Path:
    """gpt: steps 10, 20, 30 (saved twice) and 40; wide: step 5, committed last of all."""
    written, clock = open_store(str(folder)), Calendar(system_clock() - 7 * 3600 - 60)
    for step in (10, 20, 30, 30, 40):
        checkpoint = write_checkpoint(written, "gpt", step, metrics={"loss": 1 / step}, clock=clock)
        outcome = folder / RunKeys("gpt").outcome(checkpoint.attempt)
        os.utime(outcome, times=(checkpoint.committed_at, checkpoint.committed_at))  # ages count by the store's times
        clock.now += 3600
    write_checkpoint(written, "wide", 5, clock=clock)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return fill(tmp_path / "store")


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, of all tests of a file, which change nothing in it and look at no ages."""
    return fill(tmp_path_factory.mktemp("unchanged") / "store")


@pytest.fixture
def filled(folder: Path) -> Store:
    return open_store(str(folder))


@pytest.fixture
def daemon(folder: Path) -> Iterator[Daemon]:
    with running_daemon(folder.as_uri()) as running:
        yield running


@pytest.fixture
def training(tmp_path: Path) -> Path:
    """A store with one checkpoint that has a model with tied weights, an optimizer and a scheduler."""
    folder = tmp_path / "store"
    write_entries(open_store(str(folder)), ENTRIES, TREES, {"model/head": "model/emb"})
    return folder


@pytest.fixture(params=["store", "daemon"])
def target(request: pytest.FixtureRequest, folder: Path) -> tuple[str, str]:
    """What names the store itself, and a daemon for it."""
    if request.param == "store":
        return "--store", str(folder)
    return "--url", request.getfixturevalue("daemon").url


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of configuration."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "config").mkdir()
    return tmp_path / "config"
