"""Small state of a device: no save waits for the device, and what is stored is the value at the call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.amp.grad_scaler import GradScaler

from ckpt import Checkpointer
from tests.ckpt.snapshot.simulated import SimulatedDevice, SimulatedSGD, add_one, plugged_in

PATIENCE_S = 60


class Small:
    """A model whose optimizer has a learning rate on the device, a GradScaler and a loss."""

    def __init__(self, simulated: SimulatedDevice) -> None:
        self.device = simulated
        self.model = torch.nn.ParameterList([torch.nn.Parameter(simulated.tensor(1.0))])
        self.optim = SimulatedSGD(simulated, list(self.model))
        self.rate = simulated.tensor(0.0, size=1)
        self.optim.param_groups[0]["lr"] = self.rate
        self.scaler = GradScaler("cpu", init_scale=1.0)
        self.scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
        self.loss = simulated.tensor(0.0, size=3)

    def count(self) -> None:
        """Add one to each, on the device."""
        assert self.scaler._scale is not None
        for tensor in (self.rate, self.loss, self.scaler._scale):
            self.device.launch(add_one(tensor))

    def save(self, checkpointer: Checkpointer, step: int) -> Any:
        nested = {"loss": self.loss, "name": "loss"}
        return checkpointer.save_async(self.model, self.optim, step, scaler=self.scaler, nested=nested)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_values_on_a_device_are_those_of_the_call(seed: int, overlap: bool, tmp_path: Path) -> None:
    with plugged_in(seed) as simulated:
        small = Small(simulated)
        with Checkpointer(str(tmp_path), run="r", writer="thread", overlap=overlap) as checkpointer:
            for step in range(4):
                small.count()
                small.save(checkpointer, step)
            small.count()
        simulated.synchronize()
    with Checkpointer(str(tmp_path), run="r", writer="thread") as checkpointer:
        for step in range(4):
            scaler = GradScaler("cpu")
            restored = checkpointer.restore(
                small.model, small.optim, checkpoint=step, scaler=scaler, nested={"loss": None, "name": ""}
            )
            assert restored is not None
            assert restored.values["nested"]["loss"].tolist() == [step + 1.0] * 3
            assert scaler.get_scale() == step + 2.0
            assert type(scaler.state_dict()["_growth_tracker"]) is int
            assert float(small.optim.param_groups[0]["lr"]) == step + 1.0


def test_no_save_waits_for_a_device(tmp_path: Path) -> None:
    with plugged_in(0) as simulated:
        small = Small(simulated)
        with Checkpointer(str(tmp_path), run="r", writer="thread") as checkpointer:
            checkpointer.prepare(small.model, small.optim, scaler=small.scaler)
            small.optim.step()
            released = simulated.hang()
            small.count()
            handle = small.save(checkpointer, 1)  # returns though the device is stuck
            assert not handle.staged()
            released.set()
            assert handle.result(PATIENCE_S).step == 1
        simulated.synchronize()


def test_memory_that_cannot_be_pinned_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(num_bytes: int) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    with plugged_in(0) as simulated:
        small = Small(simulated)
        monkeypatch.setattr(simulated, "pinned", refuse)
        with Checkpointer(str(tmp_path), run="r", writer="thread") as checkpointer:
            assert small.save(checkpointer, 1).result(PATIENCE_S).step == 1
        simulated.synchronize()
    with Checkpointer(str(tmp_path), run="r", writer="thread") as checkpointer:
        restored = checkpointer.restore(small.model, small.optim, scaler=GradScaler("cpu"), nested={"loss": None})
        assert restored is not None
        assert restored.values["nested"]["loss"].tolist() == [0.0] * 3
