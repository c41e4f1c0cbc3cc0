"""The stores of the tests of the command line, whose exports and imports are tested here."""

import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from ckpt import Checkpointer
from ckptstore.commits.catalog import list_checkpoints
from ckptstore.format.shards import Slice
from ckptstore.run import Run
from ckptstore.stores import open_store
from tests.ckpt.dcp_state import make_model, same
from tests.ckptctl.conftest import filled, folder, training
from tests.support.command_line import Finished, invoke
from tests.support.entries import write_entries

__all__ = ["filled", "folder", "training"]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def take(store: Path, path: Path, run: str = "r", *more: object) -> Finished:
    return invoke("import", path, f"{run}@1", "--store", store, "-o", "json", *more)


def refused(store: Path, path: Path) -> Any:
    """The error of an import that must leave nothing."""
    done = take(store, path)
    assert done.code == (5 if done.error["code"] == "corrupt" else 2)
    assert (list_checkpoints(Run(open_store(str(store)), "r")), list(store.rglob("*.ckpt"))) == ([], [])
    return done.error


def given_back(store: Path, run: str = "r") -> Any:
    """The newest state of a run, exported to a file of torch."""
    to = store.parent / "out.pt"
    assert invoke("export", f"{run}@latest", "--to", to, "--store", store, "--force").code == 0
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ComplexHalf support is experimental")
        return torch.load(to, weights_only=True)


def of_types(store: Path, dtypes: Iterable[str]) -> dict[str, bytes]:
    """Write r@1, a model with a tensor of each type; gives their bytes, by type."""
    entries = [Slice.whole(f"model/{dtype}", dtype, (3, 5)) for dtype in dtypes]
    tree = {"model": {entry.dtype: {"$": "tensor", "name": entry.entry} for entry in entries}}
    _, raw = write_entries(open_store(str(store)), entries, tree, {})
    return {name.removeprefix("model/"): data for name, data in raw.items()}


def restore(store: Path, model: nn.Module, optim: Optimizer | None = None, run: str = "r") -> None:
    with Checkpointer(str(store), run=run, writer="thread") as checkpointer:
        assert checkpointer.restore(model, optim) is not None


def assert_restores(store: Path, model: nn.Module, optim: Optimizer, run: str = "r") -> None:
    """The state of `make_model` and `make_optimizer`."""
    other = make_model(9)
    fresh = AdamW(other.parameters(), lr=1.0)
    restore(store, other, fresh, run)
    assert same(other.state_dict(), model.state_dict())
    assert same(fresh.state_dict()["state"], optim.state_dict()["state"])
    assert fresh.param_groups[0]["lr"] == 0.01
