"""The benchmark of GPUs: it says so where there is none, and its code runs on a device that is simulated."""

from __future__ import annotations

import re
import sys
import time
from typing import Any

import pytest
import torch

from bench import gpu, gpu_probe
from bench.gpu_device import Gpu, Stamp
from tests.ckpt.snapshot.simulated import PromptDevice, plugged_in
from tests.support.forking import ROOT, TRAINER, run


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


without_a_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@without_a_gpu
def test_without_a_gpu_they_say_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["python -m bench.gpu"])
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        gpu.main()
    monkeypatch.setattr(sys, "argv", ["python -m bench.gpu_probe", "-o", "json"])
    with pytest.raises(SystemExit, match="2"):
        gpu_probe.main()
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("refuses", [False, True])
def test_the_probe_of_a_simulated_device(refuses: bool) -> None:
    with plugged_in(0, PromptDevice) as simulated:
        simulated.refuses_pins = refuses
        rows = {row.what: row for row in gpu_probe.look_at_driver(Host(), num_bytes=64 << 10, busy_s=0, leaves=8)}
    assert rows["memory can be pinned"].ok is not refuses
    assert ("its bytes are equal" in rows) is not refuses
    assert refuses or rows["its bytes are equal"].ok
    assert gpu_probe.line(rows["memory can be pinned"]).startswith("MISS" if refuses else "ok  ")


def test_the_tests_of_gpus_need_no_plugin() -> None:
    """Nor what CONTRIBUTING.md says: machines with a GPU have pytest, but not each plugin of this project."""
    command = gpu_probe.pytest_command()
    assert " ".join(["python", *command[1:]]) in re.sub(r" +\\\n +", " ", (ROOT / "CONTRIBUTING.md").read_text())
    [_, _, module, *arguments] = gpu_probe.pytest_command()
    code, printed, _ = run(TRAINER, module, [*arguments, "--collect-only"])
    assert code == 0, printed
    assert "test_many_small_leaves" in printed


def test_all_of_it_runs_on_a_simulated_device() -> None:
    scale = gpu.Scale(
        1 << 20, batch=2, dim=64, context=16, repetitions=1, leaves=(40,), pinned_bytes=1 << 20, most_steps=2
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
