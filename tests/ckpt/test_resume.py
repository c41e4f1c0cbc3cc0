"""Kill and resume equals an uninterrupted run: losses, parameters, buffers, optimizer state, to the bit."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver, MovingAveragePerChannelMinMaxObserver
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adafactor, AdamW
from torch.optim.lr_scheduler import CyclicLR, MultiStepLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR

from ckpt import Checkpointer
from ckptstore.errors import CkptError, SaverDied
from ckptstore.reading.source import StoreSource, read_manifest, read_receipt
from ckptstore.reading.verify import verify
from ckptstore.stores import open_store
from tests.support.kill_train import weights
from tests.support.parallel.runner import Scenario, run_scenario
from tests.support.trainers import trainer_on
from tests.support.training import Loop, Net, same_state, seed_all
from tests.support.waiting import present, wait_until


def one_cycle(optim: torch.optim.Optimizer) -> Any:
    return OneCycleLR(optim, max_lr=0.01, total_steps=50)


def cyclic(optim: torch.optim.Optimizer) -> Any:
    return CyclicLR(optim, base_lr=0.001, max_lr=0.05, step_size_up=3)


def sequential(optim: torch.optim.Optimizer) -> Any:
    return SequentialLR(optim, [StepLR(optim, 2), MultiStepLR(optim, [3, 5])], milestones=[4])


LOOPS: dict[str, Callable[[], Loop]] = {
    "adamw-onecycle": lambda: Loop(lambda p: AdamW(p, lr=0.01), one_cycle),
    "sgd-momentum-cyclic": lambda: Loop(lambda p: SGD(p, lr=0.01, momentum=0.9, nesterov=True), cyclic),
    "adafactor": lambda: Loop(lambda p: Adafactor(p, lr=0.01)),
    "lbfgs": lambda: Loop(lambda p: torch.optim.LBFGS(list(p), lr=0.1, max_iter=4)),
    "adamw-amsgrad-bf16-autocast": lambda: Loop(lambda p: AdamW(p, lr=0.01, amsgrad=True), one_cycle, autocast=True),
    "adamw-grad-scaler": lambda: Loop(
        lambda p: AdamW(p, lr=0.01), one_cycle, scaler=torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=3)
    ),
    "adamw-tensor-lr": lambda: Loop(lambda p: AdamW(p, lr=torch.tensor(0.01))),
    "sgd-sequential": lambda: Loop(lambda p: SGD(p, lr=0.1), sequential),
}


@pytest.mark.parametrize("make", LOOPS.values(), ids=LOOPS.keys())
def test_resumed_run_equals_uninterrupted_run(make: Callable[[], Loop], tmp_path: Path) -> None:
    reference = make()
    losses = [reference.step() for _ in range(12)]

    first = make()
    with Checkpointer(str(tmp_path), run="r", writer="thread") as checkpointer:
        for step in range(7):
            assert first.step() == losses[step]
            checkpointer.save_async(first.model, first.optim, step, **first.extras())

    resumed = make()
    seed_all(99)
    with Checkpointer(str(tmp_path), run="r", writer="thread") as checkpointer:
        restored = present(checkpointer.restore(resumed.model, resumed.optim, **resumed.extras()))
        assert (restored.step, [resumed.step() for _ in range(7, 12)]) == (6, losses[7:])
    assert same_state(resumed.model.state_dict(), reference.model.state_dict())
    assert same_state(resumed.optim.state_dict(), reference.optim.state_dict())
    assert resumed.model.head.weight is resumed.model.embed.weight


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_grad_scaler_on_gpu_resumes_exactly(tmp_path: Path) -> None:
    def make() -> tuple[torch.nn.Module, AdamW, Any]:
        seed_all(0)
        model = torch.nn.Linear(64, 64, device="cuda")
        return model, AdamW(model.parameters(), fused=True), torch.amp.GradScaler("cuda", growth_interval=3)

    def step(model: torch.nn.Module, optim: AdamW, scaler: Any) -> float:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(torch.randn(32, 64, device="cuda")).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optim)
        scaler.update()
        optim.zero_grad()
        return float(loss)

    model, optim, scaler = make()
    with Checkpointer(str(tmp_path), run="r") as checkpointer:
        before = [step(model, optim, scaler) for _ in range(5)]
        checkpointer.save(model, optim, 4, scaler=scaler)
        after = [step(model, optim, scaler) for _ in range(5)]
    assert before
    model, optim, scaler = make()
    with Checkpointer(str(tmp_path), run="r") as checkpointer:
        checkpointer.restore(model, optim, scaler=scaler)
        assert [step(model, optim, scaler) for _ in range(5)] == after


def test_save_in_the_middle_of_an_accumulation_window(tmp_path: Path) -> None:
    def make() -> Loop:
        return Loop(lambda p: AdamW(p, lr=0.01), one_cycle)

    def window(loop: Loop, passes: int = 4) -> list[float]:
        losses = [loop.backward() for _ in range(passes)]
        loop.update()
        return losses

    reference = make()
    losses = [window(reference) for _ in range(4)]

    first = make()
    assert [window(first) for _ in range(2)] == losses[:2]
    assert [first.backward() for _ in range(2)] == losses[2][:2]
    with Checkpointer(str(tmp_path), run="r", writer="thread") as checkpointer:
        checkpointer.save(first.model, first.optim, 2, grads=True, scheduler=first.sched)

    resumed = make()
    with Checkpointer(str(tmp_path), run="r", writer="thread") as checkpointer:
        checkpointer.restore(resumed.model, resumed.optim, scheduler=resumed.sched)
    assert (window(resumed, passes=2), window(resumed)) == (losses[2][2:], losses[3])
    assert same_state(resumed.model.state_dict(), reference.model.state_dict())


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_plateau_scheduler_and_stateful_data_loader(tmp_path: Path) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def make() -> tuple[Net, SGD, Any, Any]:
        seed_all(4)
        net = Net()
        optim = SGD(net.parameters(), lr=0.5)
        numbers: Any = list(range(40))
        loader: Any = StatefulDataLoader(numbers, batch_size=4, shuffle=True, num_workers=0)
        return net, optim, ReduceLROnPlateau(optim, patience=0), loader

    net, optim, plateau, loader = make()
    batches = iter(loader)
    with Checkpointer(str(tmp_path), run="r", writer="thread") as checkpointer:
        for _ in range(4):
            next(batches)
            plateau.step(1.0)
        checkpointer.save(net, optim, 3, plateau=plateau, loader=loader)
    rest = [batch.tolist() for batch in batches]

    net, optim, plateau_again, loader_again = make()
    with Checkpointer(str(tmp_path), run="r", writer="thread") as checkpointer:
        checkpointer.restore(net, optim, plateau=plateau_again, loader=loader_again)
    assert [batch.tolist() for batch in loader_again] == rest
    assert plateau_again.state_dict() == plateau.state_dict()
    assert optim.param_groups[0]["lr"] < 0.5


class QuantizedLinear(torch.nn.Linear):
    """Quantization-aware: weights per channel, and activations, are rounded to int8 with scales that training finds.

    `packed` is the int8 weight that a device would get; what its rounding loses is added to the next one.
    """

    packed: torch.Tensor
    lost: torch.Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        quantize: Any = partial(FakeQuantize, quant_min=-128, quant_max=127, dtype=torch.qint8)
        per_channel = {"qscheme": torch.per_channel_symmetric, "ch_axis": 0}
        self.weights = quantize(MovingAveragePerChannelMinMaxObserver, **per_channel)
        self.activations = quantize(MovingAverageMinMaxObserver)
        self.register_buffer("packed", torch.zeros(outputs, inputs, dtype=torch.int8))
        self.register_buffer("lost", torch.zeros(outputs, inputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.nn.functional.linear(self.activations(x), self.weights(self.weight), self.bias)
        with torch.no_grad():
            exact = self.weight / self.weights.scale[:, None] + self.lost
            self.packed.copy_(exact.round().clamp(-128, 127))
            self.lost.copy_(exact - self.packed)
        return out


def test_quantization_aware_training(tmp_path: Path) -> None:
    """Observers have no channels before the first batch: the restored process gets them from the checkpoint."""

    def make() -> tuple[torch.nn.Module, AdamW]:
        model = torch.nn.Sequential(QuantizedLinear(8, 16), torch.nn.Dropout(0.2), QuantizedLinear(16, 1))
        return model, AdamW(model.parameters(), 0.05)

    def step(model: torch.nn.Module, optim: AdamW) -> float:
        optim.zero_grad()
        loss: torch.Tensor = model(torch.randn(4, 8)).square().mean()
        torch.autograd.backward(loss)
        optim.step()
        return loss.item()

    torch.manual_seed(0)
    model, optim = make()
    options: Any = {"run": "gpt", "writer": "thread"}
    with Checkpointer(str(tmp_path), **options) as checkpointer:
        for _ in range(3):
            step(model, optim)
        checkpointer.save(model, optim, 2)
        expected = [step(model, optim) for _ in range(3)]
    torch.manual_seed(1)
    resumed, resumed_optim = make()
    with Checkpointer(str(tmp_path), **options) as checkpointer:
        assert checkpointer.restore(resumed, resumed_optim)
        assert [step(resumed, resumed_optim) for _ in range(3)] == expected
    state = resumed.state_dict()
    assert {state[name].dtype for name in state} == {torch.float32, torch.int8, torch.int32, torch.uint8}
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def test_death_of_the_saver_is_reported_and_healed(tmp_path: Path) -> None:
    model = nn.Linear(300, 300)
    with Checkpointer(str(tmp_path), run="r") as checkpointer:
        checkpointer.save(model, None, 1)
        first = present(checkpointer.saver_pid)
        os.kill(first, signal.SIGSTOP)
        lost = checkpointer.save_async(model, None, 2)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: checkpointer.saver_pid is None)
        with pytest.raises(SaverDied, match=f"saver process {first} was killed by signal 9"):
            checkpointer.save_async(model, None, 3)
        assert isinstance(lost.exception(), SaverDied)
        assert checkpointer.saver_pid not in (None, first)
        assert checkpointer.save(model, None, 4).step == 4
        assert [c.step for c in StoreSource(open_store(str(tmp_path))).checkpoints("r")] == [4, 1]


def test_death_of_an_idle_saver_is_reported_at_the_end_and_nothing_is_left_running(tmp_path: Path) -> None:
    checkpointer = Checkpointer(str(tmp_path), run="r")
    checkpointer.save(nn.Linear(4, 4), None, 1)
    os.kill(present(checkpointer.saver_pid), signal.SIGKILL)
    wait_until(lambda: checkpointer.saver_pid is None)
    with pytest.raises(SaverDied):
        checkpointer.close()
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    commands = [Path(f"/proc/{child}/cmdline").read_bytes() for child in children]
    assert not [command for command in commands if b"ckpt.saver.process" in command]
    checkpointer.close()


def test_restore_waits_for_the_saver_of_a_killed_trainer(tmp_path: Path) -> None:
    with trainer_on(tmp_path) as trainer:
        wait_until(lambda: trainer.saved >= 2)
        os.kill(trainer.saver, signal.SIGSTOP)
        trainer.kill()
        resume = threading.Timer(0.5, os.kill, (trainer.saver, signal.SIGCONT))
        resume.start()
        model = nn.ParameterDict({"w": torch.zeros_like(weights(0))})
        with Checkpointer(str(tmp_path), run="kill") as checkpointer:
            assert present(checkpointer.restore(model)).step >= trainer.saved
        resume.join()


def in_ranks(folder: Path, function: str, **arguments: Any) -> list[Any]:
    """What each of two ranks returns."""
    return run_scenario(Scenario(f"{__name__}:{function}", 2, arguments, 120.0), folder)


def test_two_ranks_resume_exactly_and_write_one_shard(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    whole = in_ranks(tmp_path / "1", "train", store=str(tmp_path / "whole"), steps=8)
    first = in_ranks(tmp_path / "2", "train", store=store, steps=4, save_at=3)
    second = in_ranks(tmp_path / "3", "train", store=store, steps=8)
    for rank in range(2):
        assert [first[rank][0] + second[rank][0], second[rank][1]] == [whole[rank][0], f"rank {rank}"]

    source = StoreSource(open_store(store))
    checkpoint = source.latest("ddp")
    assert (checkpoint.world_size, checkpoint.num_shards) == (2, 1)
    manifest = read_manifest(source, checkpoint)
    states = [read_receipt(source, checkpoint, manifest, rank).local["rng"] for rank in range(2)]
    assert states[0] != states[1]
    assert verify(source, checkpoint).ok


def test_gradients_of_each_rank_in_the_middle_of_a_window(tmp_path: Path) -> None:
    assert in_ranks(tmp_path / "ranks", "accumulate", store=str(tmp_path / "store")) == [True, True]
    # Large state of a rank's own goes into a shard of its own.
    assert StoreSource(open_store(str(tmp_path / "store"))).latest("ddp").num_shards == 2


def test_a_store_that_fails_rank_zero_fails_every_rank_at_once(tmp_path: Path) -> None:
    (tmp_path / "store" / "ddp").mkdir(parents=True)
    (tmp_path / "store" / "ddp" / "attempts").write_text("a file where a folder should be")
    said = in_ranks(tmp_path / "ranks", "train", store=str(tmp_path / "store"), steps=2, save_at=1)
    assert ["store_unavailable: " in one for one in said] == [True, True]


def train(store: str, steps: int, save_at: int = -1) -> Any:
    """Resume and train: the losses, and what was restored; or an error."""
    rank = dist.get_rank()
    seed_all(5)
    layers = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1)
    model = DistributedDataParallel(nn.Sequential(*layers))
    optim = AdamW(model.parameters(), lr=0.01)
    sched = OneCycleLR(optim, 0.1, total_steps=100)
    seed_all(100 + rank)
    losses = []
    try:
        with Checkpointer(store, run="ddp") as checkpointer:
            restored = checkpointer.restore(model, optim, scheduler=sched, seen=None)
            for step in range(restored.step + 1 if restored else 0, steps):
                loss = model(torch.randn(4, 8)).square().mean()
                loss.backward()
                optim.step()
                optim.zero_grad()
                sched.step()
                losses.append(loss.item().hex())
                if step == save_at:
                    checkpointer.save_async(model, optim, step, scheduler=sched, seen=f"rank {rank}")
    except CkptError as error:
        return f"{error.code}: {error}"
    return losses, restored.values["seen"] if restored else None


def accumulate(store: str) -> bool:
    """Save in the middle of an accumulation window, where gradients differ between ranks, and get them back."""
    seed_all(5)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 4096), nn.Linear(4096, 1)))
    seed_all(100 + dist.get_rank())
    with model.no_sync():
        model(torch.randn(4, 8)).square().mean().backward()
    before = [parameter.grad for parameter in model.parameters()]
    with Checkpointer(store, run="ddp") as checkpointer:
        checkpointer.save(model, None, 0, grads=True)
        model.zero_grad(set_to_none=True)
        checkpointer.restore(model)
    return same_state(before, [parameter.grad for parameter in model.parameters()])
