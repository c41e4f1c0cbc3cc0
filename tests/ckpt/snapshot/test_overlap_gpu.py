"""Overlap on a GPU: copies beside the stream that trains, which waits for them before a step; the CPU does not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from ckpt import Checkpointer
from ckptstore.errors import SnapshotTorn
from tests.support.training import same_state

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("delayed"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw-fused": lambda p: AdamW(p, lr=0.01, fused=True),
    "adamw-foreach": lambda p: AdamW(p, lr=0.01, foreach=True),
    "adamw-capturable": lambda p: AdamW(p, lr=0.01, capturable=True),
    "sgd": lambda p: SGD(p, lr=0.01, momentum=0.9),
}


def make(optimizer: Callable[[Any], Any], width: int = 512) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, width)).cuda()
    model[2].weight.data = model[2].weight.data.t().contiguous().t()
    return model, optimizer(model.parameters())


def step(model: Any, optim: Any) -> None:
    model(torch.randn(32, model[0].in_features, device="cuda")).square().mean().backward()
    optim.step()
    optim.zero_grad()


def not_to_be_called(*_: object) -> None:
    raise AssertionError("torch.cuda.synchronize was called")


def _occupy(cycles: int) -> None:
    """The GPU does nothing else on this stream: two billion cycles are about a second."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_what_is_stored_is_the_state_of_the_save(optimizer: Callable[[Any], Any], tmp_path: Path) -> None:
    model, optim = make(optimizer)
    states = []
    with Checkpointer(str(tmp_path), run="r") as checkpointer:
        for number in range(6):
            states.append(copy.deepcopy((model.state_dict(), optim.state_dict())))
            checkpointer.save_async(model, optim, number)
            step(model, optim)  # enqueued at once: nothing here waits for the GPU
        checkpointer.wait()
        for number, state in enumerate(states):
            other = make(optimizer)
            checkpointer.restore(*other, checkpoint=number)
            assert same_state((other[0].state_dict(), other[1].state_dict()), state), number


def test_neither_the_save_nor_the_gate_waits_for_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optim = make(OPTIMIZERS["adamw-fused"], width=4096)
    step(model, optim)
    with Checkpointer(str(tmp_path), run="r") as checkpointer:
        checkpointer.save(model, optim, 0)
        for number in range(1, 4):  # the first saves allocate memory, which may wait for the GPU
            step(model, optim)
            checkpointer.save(model, optim, number)
        step(model, optim)
        state = copy.deepcopy((model.state_dict(), optim.state_dict()))
        torch.cuda.synchronize()
        monkeypatch.setattr(torch.cuda, "synchronize", not_to_be_called)
        _occupy(2_000_000_000)
        occupied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        occupied.record()
        handle = checkpointer.save_async(model, optim, 9)
        step(model, optim)
        free = occupied.query()  # type: ignore[no-untyped-call]
        assert not free, "the save or the gate waited for the GPU"
        assert not handle.staged()
        handle.result(60)
        other = make(OPTIMIZERS["adamw-fused"], width=4096)
        checkpointer.restore(*other, checkpoint=9)
        assert same_state((other[0].state_dict(), other[1].state_dict()), state)


def test_prepare_pins_the_memory_of_the_first_save(tmp_path: Path) -> None:
    model, optim = make(OPTIMIZERS["adamw-fused"])
    with Checkpointer(str(tmp_path), run="r", slots=1) as checkpointer:
        checkpointer.prepare(model, optim)
        assert checkpointer._saves.client is not None
        slot = checkpointer._saves.client.acquire(1, "wait", 0)
        assert slot is not None
        assert slot.stager.gpu == model[0].weight.device
        checkpointer._saves.client.release(slot)


def test_a_change_before_the_step_fails_the_save(tmp_path: Path) -> None:
    model, optim = make(OPTIMIZERS["adamw-foreach"])
    with Checkpointer(str(tmp_path), run="r") as checkpointer:
        checkpointer.save(model, optim, 0)
        step(model, optim)
        _occupy(500_000_000)
        handle = checkpointer.save_async(model, optim, 1)
        with torch.no_grad():
            model[0].weight.clamp_(-0.01, 0.01)
        step(model, optim)
        with pytest.raises(SnapshotTorn, match=r"model/0\.weight"):
            handle.result(60)
        latest = checkpointer.latest()
        assert latest is not None
        assert latest.step == 0


def test_steps_that_are_replayed_from_a_graph_tear_no_snapshot(tmp_path: Path) -> None:
    model: Any = nn.Linear(2048, 2048, bias=False, device="cuda")
    optim = SGD(model.parameters(), lr=0.1)
    model.weight.grad = torch.ones_like(model.weight)
    warm_up = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        optim.step()
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optim.step()
    with Checkpointer(str(tmp_path), run="r") as checkpointer:
        states = []
        for number in range(4):
            states.append(model.weight.detach().clone())
            checkpointer.save_async(model, optim, number)
            graph.replay()
        checkpointer.wait()
        for number, state in enumerate(states):
            assert torch.equal(checkpointer.load(number, "model/weight")["model/weight"], state.cpu()), number


def test_a_conjugated_view_is_saved_as_it_reads(tmp_path: Path) -> None:
    value = torch.randn(1000, 100, dtype=torch.complex64, device="cuda").conj()
    with Checkpointer(str(tmp_path), run="r") as checkpointer:
        _occupy(500_000_000)
        checkpointer.save(None, None, 0, spectrum=value)
        (found,) = checkpointer.load(0, "*spectrum*").values()
    assert torch.equal(found, value.resolve_conj().cpu())
