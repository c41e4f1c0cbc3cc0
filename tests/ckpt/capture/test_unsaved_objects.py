"""The first save warns of a scaler or a shuffled loader that it was not given."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import DataLoader

import ckpt
from ckpt import Checkpointer


@pytest.fixture(autouse=True)
def frozen() -> Iterator[None]:
    """Objects of other tests are not looked at."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Progress:
    """A loop's own state object, which saves the scaler with it."""

    def __init__(self, scaler: GradScaler) -> None:
        self.scaler = scaler

    def state_dict(self) -> dict[str, Any]:
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def warnings_of(folder: Path, caplog: pytest.LogCaptureFixture, **extras: Any) -> list[str]:
    """The warnings of two saves."""
    caplog.clear()
    with caplog.at_level(logging.WARNING), Checkpointer(str(folder), run="r", writer="thread") as checkpointer:
        checkpointer._saves.looks = folder.name != "integration"
        for step in (1, 2):
            checkpointer.save(nn.Linear(2, 2), None, step, **extras)
    return [record.getMessage() for record in caplog.records if record.name == "ckpt.capture.unsaved_objects"]


def test_a_scaler_in_use(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scaler = GradScaler("cpu")
    assert warnings_of(tmp_path / "unused", caplog) == []
    scaler.scale(torch.ones(1))
    (found,) = warnings_of(tmp_path / "unsaved", caplog)
    assert "pass scaler=scaler" in found
    assert warnings_of(tmp_path / "integration", caplog) == []
    assert warnings_of(tmp_path / "given", caplog, scaler=scaler) == []
    assert warnings_of(tmp_path / "held", caplog, progress=Progress(scaler)) == []
    assert warnings_of(tmp_path / "shared", caplog, shared={"scaler": scaler}) == []


BACKWARD, STEP, SAVE, CLEAR, ZERO = ["backward", "step", "save", "clear", "zero"]


@pytest.mark.parametrize(
    ("loop", "warned"),
    [
        ((BACKWARD, STEP, SAVE, CLEAR), False),
        ((BACKWARD, STEP, CLEAR, SAVE), False),
        ((BACKWARD, STEP, ZERO, SAVE), False),
        ((ZERO, BACKWARD, STEP, SAVE), False),
        ((CLEAR, BACKWARD, BACKWARD, STEP, SAVE), False),
        ((BACKWARD, SAVE, STEP, CLEAR), True),
        ((BACKWARD, SAVE, STEP, ZERO), True),
        ((BACKWARD, BACKWARD, STEP, CLEAR, BACKWARD, SAVE, BACKWARD), True),
    ],
)
@pytest.mark.parametrize("given", [{"grads": True}, {"grads": False}, {"grads": False, "overlap": False}])
def test_a_save_within_an_accumulation_window(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, loop: tuple[str, ...], warned: bool, given: dict[str, bool]
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    optim = torch.optim.SGD(model.parameters(), 0.1)
    overlap = given.get("overlap", True)
    with (
        caplog.at_level(logging.WARNING),
        Checkpointer(str(tmp_path), run="r", writer="thread", overlap=overlap) as target,
    ):
        for number in range(3):
            for one in loop:
                if one == BACKWARD:
                    model(torch.ones(1, 2)).sum().backward()
                elif one == STEP:
                    optim.step()
                elif one == SAVE:
                    target.save_async(model, optim, number, grads=given["grads"])
                else:
                    optim.zero_grad(set_to_none=one == CLEAR)
    found = [record for record in caplog.records if "pass grads=True" in record.getMessage()]
    assert len(found) == (warned and not given["grads"])


def test_a_shuffled_loader(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    numbers: Any = [1, 2, 3]
    validation = DataLoader(numbers)
    assert warnings_of(tmp_path / "in order", caplog) == []
    loader = DataLoader(numbers, shuffle=True)
    (found,) = warnings_of(tmp_path / "unsaved", caplog)
    assert "ckpt.data.resumable(loader)" in found
    assert warnings_of(tmp_path / "given", caplog, loader=ckpt.data.resumable(loader)) == []
    assert validation is not loader
