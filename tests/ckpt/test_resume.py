"""Kill and resume equals an uninterrupted run: losses, parameters, buffers, optimizer state, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adafactor, AdamW
from torch.optim.lr_scheduler import CyclicLR, MultiStepLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR

from ckpt import Checkpointer
from tests.support.training import Loop, Net, same_state, seed_all


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
    with Checkpointer(str(tmp_path), run="r") as checkpointer:
        for step in range(7):
            assert first.step() == losses[step]
            checkpointer.save_async(first.model, first.optim, step, **first.extras())

    resumed = make()
    seed_all(99)
    with Checkpointer(str(tmp_path), run="r") as checkpointer:
        restored = checkpointer.restore(resumed.model, resumed.optim, **resumed.extras())
        assert restored is not None
        assert restored.step == 6
        assert [resumed.step() for _ in range(7, 12)] == losses[7:]
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
    with Checkpointer(str(tmp_path), run="r") as checkpointer:
        checkpointer.save(first.model, first.optim, 2, grads=True, scheduler=first.sched)

    resumed = make()
    with Checkpointer(str(tmp_path), run="r") as checkpointer:
        checkpointer.restore(resumed.model, resumed.optim, scheduler=resumed.sched)
    assert window(resumed, passes=2) == losses[2][2:]
    assert window(resumed) == losses[3]
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
    with Checkpointer(str(tmp_path), run="r") as checkpointer:
        for _ in range(4):
            next(batches)
            plateau.step(1.0)
        checkpointer.save(net, optim, 3, plateau=plateau, loader=loader)
    rest = [batch.tolist() for batch in batches]

    net, optim, plateau_again, loader_again = make()
    with Checkpointer(str(tmp_path), run="r") as checkpointer:
        checkpointer.restore(net, optim, plateau=plateau_again, loader=loader_again)
    assert [batch.tolist() for batch in loader_again] == rest
    assert plateau_again.state_dict() == plateau.state_dict()
    assert optim.param_groups[0]["lr"] < 0.5
