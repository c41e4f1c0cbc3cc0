"""How much memory the first save will need is known, and made, before it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from ckpt import Checkpointer
from ckpt.snapshot.arena import Arena
from tests.support.waiting import wait_until


def arena_of(checkpointer: Checkpointer) -> Arena:
    assert checkpointer._saves.client is not None
    return checkpointer._saves.client.arena


def made(checkpointer: Checkpointer) -> list[tuple[int, int]]:
    """Number and size of all slots, when all are there."""
    arena = arena_of(checkpointer)
    wait_until(lambda: len(arena.segments) == checkpointer.config.slots)
    return [(number, segment.num_bytes) for number, segment in arena.segments.items()]


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 32)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 8).requires_grad_(False))


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), capturable=False),
    "amsgrad": lambda model: torch.optim.Adam(model.parameters(), amsgrad=True, fused=True),
    "groups": lambda model: torch.optim.SGD(
        [{"params": [p]} if p.dim() > 1 else {"params": [p], "momentum": 0.9} for p in model.parameters()]
    ),
    "bfloat16": lambda model: torch.optim.RMSprop(model.to(torch.bfloat16).float().parameters(), centered=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_first_save_after_prepare_makes_no_slot(name: str, checkpointer: Checkpointer) -> None:
    model = network()
    optimizer = OPTIMIZERS[name](model)
    checkpointer.prepare(model, optimizer)
    assert arena_of(checkpointer).segments
    before = made(checkpointer)
    step(model, optimizer)
    handle = checkpointer.save_async(model, optimizer, 1)
    handle.result(30)
    assert made(checkpointer) == before
    assert handle.timings.raw_bytes <= before[0][1] < handle.timings.raw_bytes + 256


def test_a_restore_of_a_training_run_makes_the_slots(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    with Checkpointer(str(tmp_path), run="r", writer="thread") as checkpointer:
        checkpointer.save(model, optimizer, 1)
    with Checkpointer(str(tmp_path), run="r", writer="thread") as checkpointer:
        checkpointer.restore(model, optimizer)
        before, handle = made(checkpointer), checkpointer.save_async(model, optimizer, 2)
        handle.result(30)
        assert made(checkpointer) == before
    assert before[0][1] == handle.timings.raw_bytes


class Unusual(torch.optim.Optimizer):
    """Has state of unpredictable size."""

    def __init__(self, params: object) -> None:
        super().__init__(params, {})  # type: ignore[arg-type]

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["history"] = torch.zeros(7, *parameter.shape)


def test_an_optimizer_of_another_kind_is_not_tried_out_and_its_state_is_saved(checkpointer: Checkpointer) -> None:
    model = network()
    optimizer = Unusual(model.parameters())
    checkpointer.prepare(model, optimizer)
    small = made(checkpointer)[0][1]
    step(model, optimizer)
    handle = checkpointer.save_async(model, optimizer, 1)
    handle.result(30)
    assert small < handle.timings.raw_bytes
    wait_until(lambda: [size for _, size in made(checkpointer)] == [handle.timings.raw_bytes] * 2)
