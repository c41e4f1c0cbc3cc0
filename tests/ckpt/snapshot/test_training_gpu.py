"""Training loops on a GPU, beside copies that begin late: each checkpoint is the state at its call."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from ckpt import Checkpointer
from ckpt.device import Device, digests
from ckpt.snapshot.guard import _warn_once
from ckptstore.errors import SnapshotTorn
from tests.support.training import same_state

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("delayed"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def make_linear(width: int = 1024) -> Any:
    torch.manual_seed(0)
    return nn.Linear(width, width, device="cuda")


def backward(model: Any) -> None:
    width = next(model.parameters()).shape[-1]
    model(torch.randn(16, width, device="cuda")).square().mean().backward()


def step(model: Any, optim: Any) -> None:
    backward(model)
    optim.step()
    optim.zero_grad()


def check_saves(checkpointer: Checkpointer, model: Any, optim: Any, change: Callable[[int], object]) -> None:
    """Each of four saves holds the model of its call. No change waits for the GPU, nor does the save after it."""
    states = []
    for number in range(4):
        change(number)
        states.append(copy.deepcopy(model.state_dict()))
        checkpointer.save_async(model, optim, number)
    change(4)
    checkpointer.wait()
    for number, state in enumerate(states):
        whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}
        expected = {f"model/{name.removeprefix('module.')}": value.cpu() for name, value in whole.items()}
        assert same_state(checkpointer.load(number, "model/*"), expected), number


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_two_optimizers_that_step_on_two_streams(tmp_path: Path) -> None:
    model: Any = nn.Sequential(make_linear(), make_linear())
    first, second = SGD(model[0].parameters(), lr=0.1), SGD(model[1].parameters(), lr=0.1)
    other = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def change(_: int) -> None:
        backward(model)
        first.step()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            second.step()
        torch.cuda.current_stream().wait_stream(other)
        model.zero_grad()

    with Checkpointer(str(tmp_path), run="r") as checkpointer:
        checkpointer.prepare(model, [first, second])
        check_saves(checkpointer, model, [first, second], change)


@pytest.mark.parametrize("first", ["prepare", "capture"])
def test_a_graph_is_replayed(first: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What it changes is gathered on the GPU."""
    model, graph = make_linear(2048), torch.cuda.CUDAGraph()
    optim = SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)

    def capture() -> None:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            optim.step()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            optim.step()

    if first == "capture":
        capture()
    with caplog.at_level(logging.INFO, "ckpt"), Checkpointer(str(tmp_path), run="r") as checkpointer:
        if first == "prepare":
            checkpointer.prepare(model, optim)
            capture()
        check_saves(checkpointer, model, optim, lambda _: graph.replay())
    said = [record for record in caplog.records if "in GPU memory first" in record.message]
    assert first == "prepare" or len(said) == 1


def test_optimizers_that_step_by_turns(tmp_path: Path) -> None:
    model: Any = nn.Sequential(make_linear(), make_linear())
    turns = [AdamW(model[0].parameters(), lr=0.01, fused=True), SGD(model[1].parameters(), lr=0.1)]
    with Checkpointer(str(tmp_path), run="r") as checkpointer:
        checkpointer.prepare(model, turns)
        check_saves(checkpointer, model, turns, lambda number: step(model, turns[number % 2]))


def test_many_small_leaves(tmp_path: Path) -> None:
    dtypes = (torch.float32, torch.bfloat16)
    model = nn.ParameterList(torch.randn(1 + i % 7, 3, device="cuda").to(dtypes[i % 2]) for i in range(2000))
    optim = SGD(model.parameters(), lr=0.1)
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    with Checkpointer(str(tmp_path), run="r") as checkpointer:
        checkpointer.prepare(model, optim)
        check_saves(checkpointer, model, optim, lambda _: optim.step())


def test_digests_of_the_gpu_are_those_of_the_cpu() -> None:
    tensors = [torch.randn(size).to(dtype) for size in (0, 1, 3001, 5_000_000) for dtype in (torch.half, torch.double)]
    tensors += [torch.randn(70, 130).t(), torch.randn(3001).bfloat16()[1:]]
    found = digests([tensor.cuda() for tensor in tensors])
    assert torch.equal(found.cpu(), digests(tensors))


def test_reads_of_the_gpu_are_in_the_order_of_the_current_stream() -> None:
    """Of memory that is far apart, while the stream is busy; what is changed afterwards is read as it was."""
    sizes = (100, 1 << 20, 70) * 20  # other kernels than for a few
    tensors = [(torch.arange(size, device="cuda") % 251).to(torch.uint8) for size in sizes]
    middles = [min(tensor.numel() // 2, tensor.numel() - 64) for tensor in tensors]
    addresses = np.array([tensor.data_ptr() + at for tensor, at in zip(tensors, middles, strict=True)])
    expected = [tensor[at : at + 64].tolist() for tensor, at in zip(tensors, middles, strict=True)]
    torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
    found = Device(tensors[0].device).read(addresses, 64)
    for tensor in tensors:
        tensor.zero_()
    torch.cuda.synchronize()
    assert found.tolist() == expected


def test_a_default_device_that_is_the_gpu(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """torch then makes pinned memory only if it is asked for memory of the CPU."""
    _warn_once.cache_clear()
    model, other = make_linear(), make_linear()
    optim = AdamW(model.parameters(), lr=0.01)
    with torch.device("cuda"), Checkpointer(str(tmp_path), run="r") as checkpointer:
        checkpointer.prepare(model, optim)
        check_saves(checkpointer, model, optim, lambda _: step(model, optim))
        checkpointer.save(model, optim, 4)
        assert checkpointer.restore(other, AdamW(other.parameters())) is not None
    assert torch.equal(other.weight, model.weight)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_step_that_is_compiled(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    model = make_linear()
    optim = AdamW(model.parameters(), lr=0.01)
    compiled = torch.compile(optim.step)

    def change(_: int) -> None:
        backward(model)
        compiled()

    with Checkpointer(str(tmp_path), run="r") as checkpointer:
        checkpointer.prepare(model, optim)
        check_saves(checkpointer, model, optim, change)


def test_unpinnable_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(Device, "pin", lambda *_: 2)
    model = make_linear()
    optim = AdamW(model.parameters(), lr=0.01, fused=True)
    with Checkpointer(str(tmp_path), run="r") as checkpointer:
        check_saves(checkpointer, model, optim, lambda _: step(model, optim))
    assert "cannot be pinned" in caplog.text


def test_slots_that_grow(tmp_path: Path) -> None:
    weights = []
    with Checkpointer(str(tmp_path), run="r") as checkpointer:
        for number, width in enumerate((256, 1024, 2048)):
            model = make_linear(width)
            optim = AdamW(model.parameters(), lr=0.01, fused=True)
            checkpointer.prepare(model, optim)
            step(model, optim)
            weights.append(model.weight.detach().clone())
            checkpointer.save_async(model, optim, number)
            step(model, optim)
        checkpointer.wait()
        for number, weight in enumerate(weights):
            assert torch.equal(checkpointer.load(number)["model/weight"], weight.cpu()), number


def test_small_values_are_read_without_waiting(tmp_path: Path) -> None:
    model = make_linear()
    rate = torch.tensor(0.01, device="cuda")
    optim = AdamW(model.parameters(), lr=rate, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
    scaler.scale(torch.zeros((), device="cuda"))  # makes the scale on the GPU
    loss = torch.ones(3, device="cuda")
    with Checkpointer(str(tmp_path), run="r") as checkpointer:
        checkpointer.save(model, optim, 0, scaler=scaler, loss=loss)
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)  # type: ignore[no-untyped-call]
        occupied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        occupied.record()
        handle = checkpointer.save_async(model, optim, 1, scaler=scaler, loss=loss)
        assert scaler._scale is not None
        for tensor in (loss, rate, scaler._scale):
            tensor.add_(1)
        waited = occupied.query()  # type: ignore[no-untyped-call]
        assert not waited, "the save waited for the GPU"
        handle.result(60)
        found = torch.amp.GradScaler("cuda")
        restored = checkpointer.restore(model, optim, checkpoint=1, scaler=found, loss=None)
    assert restored is not None
    assert restored.values["loss"].tolist() == [1.0] * 3
    assert found.get_scale() == 8.0
    assert float(optim.param_groups[0]["lr"]) == pytest.approx(0.01)


def test_dropout_continues_where_it_was(tmp_path: Path) -> None:
    model = make_linear()
    optim = SGD(model.parameters(), lr=0.1)
    ones = torch.ones(4096, device="cuda")
    with Checkpointer(str(tmp_path), run="r") as checkpointer:
        checkpointer.save_async(model, optim, 0)
        expected = [nn.functional.dropout(ones) for _ in range(3)]
        checkpointer.restore(model, optim)
    assert same_state([nn.functional.dropout(ones) for _ in range(3)], expected)


@pytest.mark.parametrize("given_up", ["deleted", "replaced"])
def test_memory_that_is_given_up_after_the_save(tmp_path: Path, given_up: str) -> None:
    model = make_linear(2048)
    optim = AdamW(model.parameters(), lr=0.01, fused=True)
    with Checkpointer(str(tmp_path), run="r") as checkpointer:
        checkpointer.prepare(model, optim)
        step(model, optim)
        weight = model.weight.detach().cpu()
        handle = checkpointer.save_async(model, optim, 0)
        if given_up == "deleted":
            del model, optim
        else:
            for parameter in model.parameters():
                parameter.data = parameter.data * 2
        taken = [torch.full((2048, 2048), 7.0, device="cuda") for _ in range(8)]  # may get the same memory
        handle.result(60)
        assert torch.equal(checkpointer.load(0)["model/weight"], weight)
        del taken


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.usefixtures("nccl")
def test_a_process_group_of_nccl(tmp_path: Path, kind: str) -> None:
    model: Any = make_linear()
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=init_device_mesh("cuda", (1,)))
    optim = AdamW(model.parameters(), lr=0.01, fused=True)
    with Checkpointer(str(tmp_path), run="r") as checkpointer:
        checkpointer.prepare(model, optim)
        check_saves(checkpointer, model, optim, lambda _: step(model, optim))


@pytest.mark.usefixtures("nccl")
def test_float8_parameters_of_torchao(tmp_path: Path) -> None:
    float8 = pytest.importorskip("torchao.float8")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with float8")
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).cuda()
    config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    float8.convert_to_float8_training(model, config=config)
    fully_shard(model, mesh=init_device_mesh("cuda", (1,)))
    optim = AdamW(model.parameters(), lr=0.01)
    backward(model)
    optim.step()
    with Checkpointer(str(tmp_path), run="r") as checkpointer:
        checkpointer.save(model, optim, 0)
        before = [parameter.full_tensor().detach().clone() for parameter in model.parameters()]
        optim.step()
        checkpointer.restore(model, optim)
        assert same_state([parameter.full_tensor() for parameter in model.parameters()], before)


def test_two_processes_on_one_gpu(tmp_path: Path) -> None:
    """Of interpreters of their own: a process that has loaded CUDA has threads, and must not be forked."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, "-m", __name__, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout


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
        slot = checkpointer._saves.client.arena.acquire(1)
        assert slot is not None
        assert slot.stager.gpu == model[0].weight.device
        checkpointer._saves.client.arena.release(slot)


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


def test_a_conjugated_view_is_saved_as_it_reads(tmp_path: Path) -> None:
    value = torch.randn(1000, 100, dtype=torch.complex64, device="cuda").conj()
    with Checkpointer(str(tmp_path), run="r") as checkpointer:
        _occupy(500_000_000)
        checkpointer.save(None, None, 0, spectrum=value)
        (found,) = checkpointer.load(0, "*spectrum*").values()
    assert torch.equal(found, value.resolve_conj().cpu())


def replicas_on_one_gpu(store: str) -> None:
    """One of two processes."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: Any = DistributedDataParallel(nn.Linear(512, 512).cuda())
    optim = AdamW(model.parameters(), lr=0.01, fused=True)
    with Checkpointer(store, run="r") as checkpointer:
        checkpointer.prepare(model, optim)
        check_saves(checkpointer, model, optim, lambda _: step(model, optim))
    dist.destroy_process_group()


if __name__ == "__main__":
    replicas_on_one_gpu(sys.argv[1])
