"""Rollback in one process: a restored run equals an uninterrupted one, also where the checkpoint has less state."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, SGD, Adafactor, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop

from ckpt import Checkpointer
from ckpt.capture import optimizers
from ckpt.capture.optimizers import state_holder
from ckptstore.errors import StateMismatch
from tests.support.parallel.runner import Scenario, run_scenario
from tests.support.parallel.zero import ZeroRedundancyOptimizer
from tests.support.training import Loop, OptimizerFactory, same_state, seed_all
from tests.support.waiting import present

OPTIMIZERS: dict[str, OptimizerFactory] = {
    "sgd-momentum": lambda p: SGD(p, lr=0.01, momentum=0.9),
    "adam": lambda p: Adam(p, lr=0.01),
    "adamw": lambda p: AdamW(p, lr=0.01),
    "amsgrad": lambda p: AdamW(p, lr=0.01, amsgrad=True),
    "nadam": lambda p: NAdam(p, lr=0.01),
    "rmsprop": lambda p: RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adagrad": lambda p: Adagrad(p, lr=0.01),
    "adafactor": lambda p: Adafactor(p, lr=0.01),
    "lbfgs": lambda p: LBFGS(list(p), lr=0.1, max_iter=4),
}
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


@every_optimizer
def test_rollback_to_before_the_first_step(make: OptimizerFactory, checkpointer: Checkpointer) -> None:
    loop = Loop(make)
    checkpointer.save(loop.model, loop.optim, 0)
    losses = [loop.step() for _ in range(4)]
    model, optim = deepcopy(loop.model.state_dict()), deepcopy(loop.optim.state_dict())
    checkpointer.restore(loop.model, loop.optim)
    assert [loop.step() for _ in range(4)] == losses
    assert same_state(loop.model.state_dict(), model)
    assert same_state(loop.optim.state_dict(), optim)


class Branches(nn.Module):
    """Two layers; the second one can be frozen, or left out of the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.skipped = False

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(values))
        return hidden if self.skipped else torch.tanh(self.second(hidden))


def train(net: Branches, optim: Optimizer, steps: Iterable[int], branch: str) -> None:
    """Steps on data that their numbers decide. branch: what becomes of the second layer."""
    net.skipped = branch == "late"
    net.second.requires_grad_(branch != "frozen")
    for step in steps:
        values = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))

        def closure(values: torch.Tensor = values) -> float:
            optim.zero_grad()
            loss = nn.functional.mse_loss(net(values), values)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.item()

        optim.step(closure)
    optim.zero_grad()


@pytest.mark.parametrize("branch", ["frozen", "late"])
@every_optimizer
def test_rollback_to_before_a_branch_was_trained(
    make: OptimizerFactory, branch: str, checkpointer: Checkpointer
) -> None:
    seed_all(0)
    net = Branches()
    optim = make(net.parameters())
    train(net, optim, range(3), branch)
    checkpointer.save(net, optim, 3)
    train(net, optim, range(3, 6), "trained")
    checkpointer.save(net, optim, 6)
    trained = deepcopy(net.state_dict()), deepcopy(optim.state_dict())
    train(net, optim, range(6, 9), "trained")

    assert present(checkpointer.restore(net, optim)).step == 6, "the newest first"
    assert same_state((net.state_dict(), optim.state_dict()), trained)
    checkpointer.restore(net, optim, checkpoint=3)
    train(net, optim, range(3, 6), "trained")
    assert same_state((net.state_dict(), optim.state_dict()), trained)


def test_rollback_of_several_optimizers_in_a_sequence(checkpointer: Checkpointer) -> None:
    seed_all(0)
    net = Branches()
    optims = [AdamW(net.first.parameters(), lr=0.01), SGD(net.second.parameters(), lr=0.01, momentum=0.9)]

    def state() -> list[Any]:
        return deepcopy([net.state_dict(), *(optim.state_dict() for optim in optims)])

    checkpointer.save(net, optims, 0)
    start = state()
    for optim in optims:
        train(net, optim, range(3), "trained")
    checkpointer.restore(net, optims)
    assert same_state(state(), start)


@pytest.mark.parametrize("strict", [True, False])
def test_parameter_groups_that_do_not_fit_are_refused_before_anything_changes(
    strict: bool, checkpointer: Checkpointer
) -> None:
    seed_all(0)
    net = Branches()
    groups = [{"params": net.first.parameters(), "lr": 0.1}, {"params": net.second.parameters(), "lr": 0.2}]
    optim = AdamW(groups)
    train(net, optim, range(2), "trained")
    checkpointer.save(net, optim, 2)
    merged = AdamW(net.parameters())
    train(net, merged, range(2), "trained")
    before = deepcopy([net.state_dict(), merged.state_dict()])
    with pytest.raises(StateMismatch, match="no saved parameter group holds all of") as caught:
        checkpointer.restore(net, merged, strict=strict)
    assert "nothing was changed" in caught.value.hint
    assert same_state([net.state_dict(), merged.state_dict()], before)


@pytest.mark.parametrize("sharding", ["fsdp2", "fsdp1", "fsdp1_flat", "zero"])
def test_rollback_of_sharded_state(sharding: str, tmp_path: Path) -> None:
    arguments = {"store": str(tmp_path / "store"), "sharding": sharding}
    assert (
        run_scenario(Scenario(f"{__name__}:roll_back", 2, arguments), tmp_path / "scenario")
        == [{"restored": True, "trained": True}] * 2
    )


def test_state_of_another_class_of_optimizer_is_refused(checkpointer: Checkpointer) -> None:
    seed_all(0)
    net = Branches()
    saved = AdamW(net.parameters(), lr=0.01)
    train(net, saved, range(2), "trained")
    other = SGD(net.parameters(), lr=0.5, momentum=0.9)
    before = deepcopy(other.state_dict())
    checkpointer.save(net, saved, 2)
    checkpointer.save(net, saved, 3)  # which describes the groups again
    for step in (2, 3):
        with pytest.raises(StateMismatch, match="optim: state of AdamW in the checkpoint, SGD here"):
            checkpointer.restore(net, other, checkpoint=step)
        assert same_state(other.state_dict(), before)
    restored = present(checkpointer.restore(net, other, strict=False))
    assert restored.mismatched == ["optim: state of AdamW in the checkpoint, SGD here"]
    assert not any("optimizer_class" in group for group in other.param_groups)


def test_state_without_its_optimizers_class_is_not_checked(
    checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Branches()
    with monkeypatch.context() as patch:
        patch.setattr(optimizers, "_class_of", lambda optimizer: None)
        checkpointer.save(net, AdamW(net.parameters(), lr=0.25), 1)
    other = SGD(net.parameters(), lr=0.5)
    checkpointer.restore(net, other)
    assert other.param_groups[0]["lr"] == 0.25


def roll_back(store: str, sharding: str) -> dict[str, Any]:
    """Whether the state before the first step was restored after three, and whether three more equal the first."""
    model, optim = _make(sharding)

    def train() -> list[Any]:
        for step in range(3):
            model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optim.step()
            optim.zero_grad()
        return _state(model, optim)

    with Checkpointer(store, run="r", writer="thread") as checkpointer:
        checkpointer.save(model, optim, 0)
        start, trained = _state(model, optim), train()
        checkpointer.restore(model, optim)
        restored = same_state(_state(model, optim), start)
    return {"restored": restored, "trained": same_state(train(), trained)}


def _make(sharding: str) -> tuple[nn.Module, Optimizer]:
    seed_all(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    if sharding == "zero":
        return model, ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.01)
    if sharding == "fsdp2":
        fully_shard(model)
    else:
        originals = sharding == "fsdp1"
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=originals)
    return model, AdamW(model.parameters(), lr=0.01)


def _state(model: nn.Module, optim: Optimizer) -> list[Any]:
    kept, parameters = state_holder(optim).state, list(model.parameters())
    return deepcopy([
        [_local(p) for p in parameters],
        [{name: _local(value) for name, value in kept[p].items()} if p in kept else None for p in parameters],
    ])  # fmt: skip


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
