"""Saves after the first use the cached description of the objects, and equal saves that describe them again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ckpt import Checkpointer
from ckpt.capture.fingerprint import Capturer
from ckptstore.reading.source import read_manifest
from tests.ckpt.loops import OPTIMIZERS, Loop, open_run
from tests.support.training import same_state


def test_saves_follow_a_structure_that_changes(tmp_path: Path) -> None:
    """Descriptions are used again from save to save; each of these changes what is to be described."""
    loop = Loop(OPTIMIZERS["adamw"])
    model: Any = loop.model
    states: list[Any] = []

    def moved() -> None:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()

    def tied() -> None:
        model.last.bias = nn.Parameter(model.last.bias.detach())
        model.register_parameter("twin", model.last.bias)
        checkpointer.prepare(model, loop.optim)

    def widened() -> None:
        model.extra = nn.Linear(8, 8)
        loop.optim.add_param_group({"params": list(model.extra.parameters())})
        checkpointer.prepare(model, loop.optim)

    def halved() -> None:
        model.frozen.to(torch.float64)
        checkpointer.prepare(model, loop.optim)

    def turned() -> None:
        loop.optim.param_groups.reverse()
        loop.optim.param_groups[0]["lr"] = 0.5
        checkpointer.prepare(model, loop.optim)  # a parameter of no module is named by its place

    def hooked() -> None:
        model.register_state_dict_post_hook(lambda _, state, prefix, __: state.update({f"{prefix}more": torch.ones(3)}))
        checkpointer.prepare(model, loop.optim)

    def nothing() -> None:
        pass

    changes: tuple[Callable[[], object], ...] = (
        *(nothing, nothing, loop.step, moved, nothing, tied, widened, halved, turned),
        *(partial(change, loop.optim) for change in (_slow, _replace, _count, _forget)),
        *(nothing, hooked, nothing),
    )
    with (
        open_run(tmp_path, overlap=False) as reference,
        open_run(tmp_path / "again") as checkpointer,
    ):
        for step, change in enumerate(changes):
            change()
            states.append(checkpointer.save(model, loop.optim, step))
            reference._saves.agreed._capturer = Capturer()
            reference._saves.agreed._agreement = None
            fresh = reference.save(model, loop.optim, step)
            assert same_state(checkpointer.load(step), reference.load(step)), step
            assert _trees(checkpointer, states[-1]) == _trees(reference, fresh), step


def _slow(optim: Optimizer) -> None:
    optim.param_groups[1]["lr"] = 0.25


def _replace(optim: Optimizer) -> None:
    for state in optim.state.values():
        state |= {"exp_avg": state["exp_avg"] * 2, "calls": 1}


def _count(optim: Optimizer) -> None:
    for state in optim.state.values():
        state["calls"] += 1


def _forget(optim: Optimizer) -> None:
    for state in optim.state.values():
        del state["calls"]


def _trees(checkpointer: Checkpointer, checkpoint: Any) -> Any:
    content = read_manifest(checkpointer._source, checkpoint)
    return content.content.trees, content.content.aliases
