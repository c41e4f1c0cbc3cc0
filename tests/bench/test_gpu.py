"""The benchmark of GPUs: it says so where there is none, and its code runs on a device that is simulated."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest
import torch

from bench import gpu
from bench.gpu_device import Gpu, Stamp
from tests.ckpt.snapshot.simulated import PromptDevice, plugged_in


class _Time:
    def __init__(self) -> None:
        self.at = time.perf_counter()

    def seconds_until(self, later: Stamp) -> float:
        assert isinstance(later, _Time)
        return later.at - self.at


class Host(Gpu):
    """The CPU in place of a GPU."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.name = "a simulated device"

    def synchronize(self) -> None:
        pass

    def stamp(self) -> Stamp:
        return _Time()

    def occupy(self, seconds: float) -> None:
        pass

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["python -m bench.gpu"])
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        gpu.main()


def test_all_of_it_runs_on_a_simulated_device() -> None:
    scale = gpu.Scale(
        1 << 20, batch=2, dim=64, context=16, repetitions=1, leaves=(8, 40), pinned_bytes=1 << 20, most_steps=2
    )
    with plugged_in(0, PromptDevice):
        report = gpu.measure(Host(), scale)
    rows: dict[str, Any] = {label: seconds for label, seconds, _ in report.rows}
    assert len(rows) == len(report.rows)
    assert "save_async, GPU busy, 40 leaves" in rows
    assert "wait of the GPU at the gate" in rows
    assert report.facts["pinning, pause"] > 0
    assert "store in /" in report.what
    (exact,) = [goal for goal in report.goals if goal.name == "bit-exact restores"]
    assert exact.ok
