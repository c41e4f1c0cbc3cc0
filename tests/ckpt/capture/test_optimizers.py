"""State of optimizers belongs to parameters by name: whatever groups, optimizers or shapes there are at a restore."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from ckpt import Checkpointer
from ckptstore.errors import StateMismatch
from tests.support.training import Net, same_state, seed_all
from tests.support.waiting import present


def step(net: Net, *optims: torch.optim.Optimizer) -> None:
    net(torch.randint(0, 31, (8,))).square().mean().backward()
    for optim in optims:
        optim.step()
        optim.zero_grad()


def test_optimizer_state_follows_the_parameter_not_its_index(checkpointer: Checkpointer) -> None:
    def groups(net: Net, turned: bool) -> list[dict[str, Any]]:
        decayed: dict[str, Any] = {"params": [net.embed.weight, net.hidden.weight], "weight_decay": 0.1}
        plain = {"params": [net.hidden.bias, net.norm.weight, net.norm.bias], "weight_decay": 0.0}
        if turned:
            decayed["params"].reverse()
            return [plain, decayed]
        return [decayed, plain]

    def make(turned: bool) -> tuple[Net, AdamW]:
        seed_all(1)
        net = Net()
        return net, AdamW(groups(net, turned), lr=0.01)

    net, optim = make(turned=False)
    for _ in range(3):
        step(net, optim)
    checkpointer.save(net, optim, 2)
    step(net, optim)

    turned_net, turned_optim = make(turned=True)
    checkpointer.restore(turned_net, turned_optim)
    assert [group["weight_decay"] for group in turned_optim.param_groups] == [0.0, 0.1]
    step(turned_net, turned_optim)
    assert same_state(turned_net.state_dict(), net.state_dict())


def test_several_optimizers_and_an_average_model(checkpointer: Checkpointer) -> None:
    def make() -> tuple[Net, dict[str, torch.optim.Optimizer], Any]:
        seed_all(2)
        net = Net()
        optims: dict[str, torch.optim.Optimizer] = {
            "embed": SGD([net.embed.weight], lr=0.1, momentum=0.9),
            "rest": AdamW([*net.hidden.parameters(), *net.norm.parameters()], lr=0.01),
        }
        return net, optims, torch.optim.swa_utils.AveragedModel(net)

    net, optims, average = make()
    for _ in range(3):
        step(net, *optims.values())
        average.update_parameters(net)
    checkpointer.save(net, optims, 2, average=average, epoch=(3, "x"))
    step(net, *optims.values())
    average.update_parameters(net)

    again, again_optims, again_average = make()
    restored = present(checkpointer.restore(again, again_optims, average=again_average, epoch=None))
    assert restored.values == {"epoch": (3, "x")}
    step(again, *again_optims.values())
    again_average.update_parameters(again)
    assert same_state(again.state_dict(), net.state_dict())
    assert same_state(again_average.state_dict(), average.state_dict())


def test_a_parameter_of_another_shape_gets_no_optimizer_state(checkpointer: Checkpointer) -> None:
    def once(model: nn.Module, optim: torch.optim.Optimizer, width: int) -> None:
        model(torch.ones(1, width)).sum().backward()
        optim.step()

    def trained(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(width, 4), nn.Linear(4, 2))
        optim = torch.optim.AdamW(model.parameters())
        once(model, optim, width)
        return model, optim

    saved, saved_optim = trained(8)
    model, optim = trained(16)
    checkpointer.save(saved, saved_optim, 0)
    restored = present(checkpointer.restore(model, optim, strict=False))
    assert restored.mismatched == ["model/0.weight: [4, 8] in the checkpoint, [4, 16] here"]
    resized, *others = model.parameters()
    assert resized not in optim.state
    for own, other in zip(others, list(saved.parameters())[1:], strict=True):
        assert same_state(optim.state[own], saved_optim.state[other])
    once(model, optim, 16)


def test_optimizer_of_other_parameters(checkpointer: Checkpointer) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optim = torch.optim.AdamW(model.parameters())
    checkpointer.save(model, optim, 0)
    with pytest.raises(StateMismatch, match=r"1\.weight"):
        checkpointer.restore(model, torch.optim.AdamW(model[0].parameters()))
