"""The first save warns of what it was not given: scalers, optimizers, schedulers, loaders, parameters."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import DataLoader

import ckpt
from ckpt import Checkpointer
from tests.support.waiting import present


@pytest.fixture(autouse=True)
def frozen() -> None:
    """Objects of other tests are not looked at. They stay frozen: to collect them again takes seconds."""
    gc.collect()
    gc.freeze()


class Progress:
    """A loop's own state object, which saves the scaler or scheduler with it."""

    def __init__(self, scaler: Any) -> None:
        self.scaler = scaler

    def state_dict(self) -> Any:
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def warnings_of(
    folder: Path, caplog: pytest.LogCaptureFixture, optim: Any = None, model: nn.Module | None = None, **extras: Any
) -> list[str]:
    """The warnings of two saves."""
    caplog.clear()
    with caplog.at_level(logging.WARNING), Checkpointer(str(folder), run="r", writer="thread") as checkpointer:
        checkpointer._saves.looks = folder.name != "integration"
        for step in (1, 2):
            checkpointer.save(model or (nn.Linear(2, 2) if optim is None else MODEL), optim, step, **extras)
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


MODEL, LOSS = nn.Linear(2, 2), nn.Linear(1, 1)
WEIGHT = nn.Parameter(torch.zeros(3))


def test_a_trained_parameter_in_no_saved_module(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    optim = torch.optim.SGD([*MODEL.parameters(), WEIGHT, frozen, *LOSS.parameters()], 0.1)
    assert warnings_of(tmp_path / "integration", caplog, optim) == []
    (found,) = warnings_of(tmp_path / "unsaved", caplog, optim)
    assert "(optim/group0.param2, optim/group0.param4, optim/group0.param5)" in found
    (found,) = warnings_of(tmp_path / "loss", caplog, optim, loss=LOSS)
    assert "(optim/group0.param2)" in found
    for given in ({"w": WEIGHT}, {"shared": {"all": {"w": WEIGHT}}}, {"weights": nn.ParameterList([WEIGHT])}):
        assert warnings_of(tmp_path / next(iter(given)), caplog, optim, loss=LOSS, **given) == []


class Sam(torch.optim.Optimizer):
    """Its first step perturbs parameters; the second is one of the optimizer inside."""

    def __init__(self, parameters: Any, inner: type[torch.optim.Optimizer], **options: Any) -> None:
        super().__init__(parameters, {})
        self.base_optimizer = inner(self.param_groups, **options)

    def steps(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["old"] = parameter.detach().clone()
        self.base_optimizer.step()


def test_an_optimizer_that_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    plain, sam = torch.optim.SGD(model.parameters(), 0.1), Sam(model.parameters(), torch.optim.Adam, lr=0.1)
    assert warnings_of(tmp_path / "unused", caplog, model=model) == []
    plain.step()
    assert warnings_of(tmp_path / "without state", caplog, model=model) == []
    sam.steps()
    for given in (None, plain):
        (found,) = warnings_of(tmp_path / f"unsaved {given is None}", caplog, given, model)
        assert "an optimizer of saved parameters, Adam, is not saved" in found
    assert warnings_of(tmp_path / "other", caplog) == []
    assert warnings_of(tmp_path / "integration", caplog, model=model) == []
    assert warnings_of(tmp_path / "saved", caplog, sam.base_optimizer, model) == []


def test_a_scheduler_of_a_saved_optimizer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    optim, other = (torch.optim.SGD(MODEL.parameters(), 0.1) for _ in range(2))
    torch.optim.lr_scheduler.StepLR(other, 5)
    assert warnings_of(tmp_path / "none", caplog, optim) == []
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optim, 8)
    (found,) = warnings_of(tmp_path / "unsaved", caplog, optim)
    assert "scheduler=scheduler" in found
    assert warnings_of(tmp_path / "integration", caplog, optim) == []
    for n, given in enumerate((scheduler, scheduler.state_dict(), {"s": scheduler.state_dict()}, Progress(scheduler))):
        assert warnings_of(tmp_path / str(n), caplog, optim, scheduler=given) == []


BACKWARD, STEP, CLOSURE, INF, SAVE, CLEAR, ZERO = ["backward", "step", "closure", "inf", "save", "clear", "zero"]


@pytest.mark.parametrize(
    ("loop", "warned"),
    [
        ((BACKWARD, STEP, SAVE, CLEAR), False),
        ((BACKWARD, STEP, CLEAR, SAVE), False),
        ((BACKWARD, STEP, ZERO, SAVE), False),
        ((ZERO, BACKWARD, STEP, SAVE), False),
        ((CLEAR, BACKWARD, BACKWARD, STEP, SAVE), False),
        ((CLEAR, CLOSURE, SAVE), False),
        ((BACKWARD, STEP, CLEAR, BACKWARD, INF, SAVE, CLEAR), False),  # a GradScaler skips the step
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
    optim, overlap = torch.optim.SGD(model.parameters(), 0.1), given.get("overlap", True)
    caplog.set_level(logging.WARNING)
    with Checkpointer(str(tmp_path), run="r", writer="thread", overlap=overlap) as target:
        for number in range(3):
            for one in loop:
                if one == BACKWARD:
                    model(torch.ones(1, 2)).sum().backward()
                elif one == STEP:
                    optim.step()
                elif one == CLOSURE:  # as Lightning does
                    optim.step(lambda: model(torch.ones(1, 2)).sum().backward())
                elif one == INF:
                    present(model.get_parameter("2.weight").grad)[0, 0] = torch.inf
                elif one == SAVE:
                    target.save_async(model, optim, number, grads=given["grads"])
                else:
                    optim.zero_grad(set_to_none=one == CLEAR)
    assert sum("pass grads=True" in text for text in caplog.messages) == (warned and not given["grads"])


def test_a_shuffled_loader(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    numbers: Any = [1, 2, 3]
    validation = DataLoader(numbers)
    assert warnings_of(tmp_path / "in order", caplog) == []
    loader = DataLoader(numbers, shuffle=True)
    (found,) = warnings_of(tmp_path / "unsaved", caplog)
    assert "ckpt.data.resumable(loader)" in found
    assert warnings_of(tmp_path / "given", caplog, loader=ckpt.data.resumable(loader)) == []
    assert validation is not loader
