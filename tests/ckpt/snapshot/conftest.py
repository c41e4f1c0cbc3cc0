"""Where the tensors of a test lie: in host memory, and on simulated devices.

CKPTD_SCHEDULES says on how many devices, each of which has another schedule; one by default.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import pytest
import torch

from ckpt.device import Device
from tests.ckpt.snapshot.simulated import SCHEDULES, PromptDevice, Training, plugged_in

_SCHEDULES = int(os.environ.get("CKPTD_SCHEDULES", 1))


@pytest.fixture(params=[None, *range(_SCHEDULES)], ids=["host", *(f"device-{seed}" for seed in range(_SCHEDULES))])
def everywhere(request: pytest.FixtureRequest) -> Iterator[None]:
    """Host memory, then devices whose copies are late."""
    if request.param is None:
        yield
        return
    with plugged_in(request.param, PromptDevice) as simulated:
        yield
        simulated.synchronize()


@pytest.fixture(params=SCHEDULES)
def training(request: pytest.FixtureRequest) -> Iterator[Training]:
    with plugged_in(request.param) as simulated:
        yield Training(simulated)
        simulated.synchronize()


@pytest.fixture
def delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every copy on the side stream of a GPU begins 0.05 s late, so that work that does not wait for it tears it."""
    copy, gather = Device.copy, Device.gather

    def occupy(device: Device) -> None:
        device.run(lambda: torch.cuda._sleep(100_000_000))  # type: ignore[no-untyped-call]

    def late_gather(device: Device, tensors: Sequence[torch.Tensor], side: bool) -> torch.Tensor:
        if side:
            occupy(device)
        return gather(device, tensors, side)

    def late(device: Device, views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], side: bool) -> None:
        if side:
            occupy(device)
        copy(device, views, tensors, side)

    monkeypatch.setattr(Device, "copy", late)
    monkeypatch.setattr(Device, "gather", late_gather)
