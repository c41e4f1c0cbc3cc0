"""Restores to a GPU: every bit, through a few pinned buffers, beside the stream that trains and in order with it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from ckpt import Checkpointer
from ckpt.restoring import gpu_copy
from tests.ckpt.restoring.receiving import check_slices
from tests.support.training import same_state

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

_BUFFER_BYTES = 256 << 10


def make(seed: int, device: str = "cuda") -> tuple[Any, AdamW]:
    """Tensors in and out of order, of several types, and one layer that stays on the CPU."""
    torch.manual_seed(seed)
    model: Any = nn.ModuleDict(
        {
            "plain": nn.Linear(512, 700),
            "across": nn.Linear(300, 512),
            "image": nn.Conv2d(32, 64, 3).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
            "norm": nn.BatchNorm1d(512),
            "coarse": nn.Linear(128, 128).bfloat16(),
        }
    ).to(device)
    model["across"].weight.data = model["across"].weight.data.t().contiguous().t()
    model["host"] = nn.Linear(256, 256)
    optim = AdamW(model.parameters(), foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optim.step()
    return model, optim


def state_of(model: Any, optim: AdamW) -> Any:
    return copy.deepcopy((model.state_dict(), optim.state_dict()))


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Tensor]]:
    """Staging buffers as they are made: three small ones at most; and no thread waits for the whole device."""
    made: list[torch.Tensor] = []
    make_staging = gpu_copy.GpuReceiver._make_staging

    def counted(receiver: gpu_copy.GpuReceiver) -> torch.Tensor:
        made.append(make_staging(receiver))
        return made[-1]

    def not_to_be_called(*_: object) -> None:
        raise AssertionError("torch.cuda.synchronize was called")

    with monkeypatch.context() as patches:
        patches.setattr(gpu_copy.GpuReceiver, "_make_staging", counted)
        patches.setattr(gpu_copy, "CHUNK_BYTES", _BUFFER_BYTES)
        patches.setattr(gpu_copy, "NUM_BUFFERS", 3)
        patches.setattr(torch.cuda, "synchronize", not_to_be_called)
        yield made


@pytest.mark.parametrize("compress", ["off", "fast"])
@pytest.mark.parametrize("saved_on", ["cuda", "cpu"])
def test_all_bits_arrive(saved_on: str, compress: Any, tmp_path: Path, pinned: list[torch.Tensor]) -> None:
    model, optim = make(1, saved_on)
    with Checkpointer(str(tmp_path), run="r", compress=compress) as checkpointer:
        checkpointer.save(model, optim, 1)
        other, other_optim = make(2)
        checkpointer.restore(other, other_optim)
    assert same_state(state_of(other, other_optim), state_of(model, optim))
    assert {value.device.type for value in other.state_dict().values()} == {"cpu", "cuda"}
    largest = max(parameter.nbytes for parameter in model.parameters())
    assert 0 < len(pinned) <= 3
    assert all(buffer.is_pinned() and buffer.nbytes < 2 * max(largest, _BUFFER_BYTES) for buffer in pinned)


def test_new_state_and_other_types_arrive(tmp_path: Path, pinned: list[torch.Tensor]) -> None:
    model, optim = make(1)
    with Checkpointer(str(tmp_path), run="r") as checkpointer:
        checkpointer.save(model, optim, 1)
        other = make(2)[0].double()
        fresh = AdamW(other.parameters(), foreach=False)
        checkpointer.restore(other, fresh, strict=False)
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value.to(other.state_dict()[name].dtype)), name
    for saved, state in zip(optim.state.values(), fresh.state.values(), strict=True):
        assert same_state(state["exp_avg"], saved["exp_avg"])
        assert state["exp_avg"].device == saved["exp_avg"].device
    assert pinned


def test_what_was_asked_of_the_gpu_before_comes_before_and_what_is_asked_next_comes_after(tmp_path: Path) -> None:
    model, optim = make(1)
    with Checkpointer(str(tmp_path), run="r") as checkpointer:
        checkpointer.save(model, optim, 1)
        other, other_optim = make(2)
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            torch.cuda._sleep(500_000_000)  # type: ignore[no-untyped-call]
            for parameter in other.parameters():
                parameter.data.fill_(7)
            checkpointer.restore(other, other_optim)
            found = [parameter.detach().clone() for parameter in other.parameters()]
    torch.cuda.synchronize()
    assert same_state(found, [parameter.detach() for parameter in model.parameters()])


def test_slices_arrive_wherever_they_live(tmp_path: Path, pinned: list[torch.Tensor]) -> None:
    model, optim = make(1)
    with Checkpointer(str(tmp_path), run="r") as checkpointer:
        checkpointer.save(model, optim, 1)
    check_slices(str(tmp_path), 1, "plain.weight", model["plain"].weight.detach(), "cuda")
    assert pinned


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_devices_of_one_process(tmp_path: Path, pinned: list[torch.Tensor]) -> None:
    def spread(seed: int) -> Any:
        torch.manual_seed(seed)
        return nn.ModuleList([nn.Linear(512, 512, device=f"cuda:{number}") for number in (0, 1)])

    model, other = spread(1), spread(2)
    with Checkpointer(str(tmp_path), run="r") as checkpointer:
        checkpointer.save(model, None, 1)
        checkpointer.restore(other, None)
    assert same_state(other.state_dict(), model.state_dict())
    assert pinned
