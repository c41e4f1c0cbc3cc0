"""The stores of the tests of the command line, whose exports and imports are tested here."""

import os
from pathlib import Path
from typing import Any

import pytest

from ckptstore.commits.catalog import list_checkpoints
from ckptstore.run import Run
from ckptstore.stores import open_store
from tests.ckptctl.conftest import filled, folder, training
from tests.support.command_line import Finished

__all__ = ["Payload", "filled", "folder", "store", "training", "without_a_trace"]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


class Payload:
    """What a hostile pickle would do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def without_a_trace(store: Path, done: Finished) -> Any:
    """The error of an import that must leave nothing."""
    assert done.code != 0
    assert (list_checkpoints(Run(open_store(str(store)), "r")), list(store.rglob("*.ckpt"))) == ([], [])
    return done.error
