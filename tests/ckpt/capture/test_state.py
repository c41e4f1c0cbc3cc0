"""The fingerprint of a training loop changes with whatever changes its description, and holds no tensor of it. Saves
after the first use the cached description of the objects; equal saves describe them again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from ckpt import Checkpointer
from ckpt.capture.state import Capturer, StateFingerprint, exchange
from ckpt.capture.train_state import TrainState
from ckptstore.codecs import fused
from ckptstore.reading.source import read_manifest
from tests.ckpt.loops import OPTIMIZERS, open_run
from tests.ckpt.loops import Loop as TrainingLoop
from tests.support.training import same_state


class OwnState(nn.Module):
    def get_extra_state(self) -> Any:
        return {"calls": 1}


class OwnOptimizer(torch.optim.AdamW):
    """Its state_dict is not that of torch."""

    def state_dict(self) -> Any:
        return super().state_dict()


class Loop:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ModuleDict({"a": nn.Linear(8, 8)}))
        self.model.register_module("nobody", None)
        self.model.register_buffer("hidden", torch.ones(3), persistent=False)
        self.model.register_buffer("turning", torch.ones(3, dtype=torch.complex64))
        self.model.register_buffer("out_of_order", torch.ones(4, 4, 4).permute(2, 0, 1))
        self.optim = torch.optim.AdamW([{"params": [p]} for p in self.model.parameters()])
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optim.step()
        self.kept["number"], self.kept["none"] = 0.0, None

    @property
    def weight(self) -> Any:
        return self.model[0].weight

    @property
    def kept(self) -> Any:
        return self.optim.state[self.weight]

    def fingerprint(self) -> StateFingerprint:
        return StateFingerprint(TrainState.of(self.model, self.optim, {}))


def no_grad(change: Callable[[Loop], object]) -> Callable[[Loop], object]:
    return torch.no_grad()(change)


def assign(values: Any, key: str, value: Any) -> None:
    values[key] = value


NOTICED: dict[str, Callable[[Loop], object]] = {
    "other memory": lambda loop: setattr(loop.weight, "data", loop.weight.data.clone()),
    "other strides": no_grad(lambda loop: loop.weight.t_()),
    "other strides, in order neither before nor after": lambda loop: setattr(
        loop.model.out_of_order, "data", loop.model.out_of_order.data.transpose(1, 2)
    ),
    "other shape of the same bytes": lambda loop: setattr(loop.weight, "data", loop.weight.data.view(4, 16)),
    "fewer elements of the same memory": no_grad(lambda loop: loop.kept["exp_avg"].resize_(2, 8)),
    "other type of the same bytes": lambda loop: setattr(
        loop.kept["exp_avg"], "data", loop.kept["exp_avg"].data.view(torch.int32)
    ),
    "conjugate": lambda loop: setattr(loop.model.turning, "data", loop.model.turning.data.conj()),
    "negative": lambda loop: setattr(loop.weight, "data", loop.weight.data._neg_view()),
    "frozen": lambda loop: loop.weight.requires_grad_(False),
    "other parameter": lambda loop: setattr(loop.model[0], "weight", nn.Parameter(loop.weight.detach())),
    "other state": lambda loop: assign(loop.kept, "exp_avg", loop.kept["exp_avg"].clone()),
    "state in two places": lambda loop: assign(loop.kept, "exp_avg", loop.kept["exp_avg_sq"]),
    "more state": lambda loop: assign(loop.kept, "more", torch.zeros(2)),
    "less state": lambda loop: loop.kept.pop("exp_avg"),
    "no state of a parameter": lambda loop: loop.optim.state.pop(loop.weight),
    "state under another name": lambda loop: assign(loop.kept, "average", loop.kept.pop("exp_avg")),
    "other number": lambda loop: assign(loop.kept, "number", 1.0),
    "other sign of zero": lambda loop: assign(loop.kept, "number", -0.0),
    "number of another type": lambda loop: assign(loop.kept, "number", 0),
    "truth instead of a number": lambda loop: assign(loop.kept, "number", False),
    "text instead of a number": lambda loop: assign(loop.kept, "number", "0.0"),
    "something instead of nothing": lambda loop: assign(loop.kept, "none", torch.zeros(2)),
    "other group": lambda loop: loop.optim.add_param_group({"params": [nn.Parameter(torch.zeros(2))]}),
    "other order of groups": lambda loop: loop.optim.param_groups.reverse(),
    "parameter in another group": lambda loop: loop.optim.param_groups[0]["params"].append(
        loop.optim.param_groups[1]["params"].pop()
    ),
    "capturable": lambda loop: assign(loop.optim.param_groups[0], "capturable", True),
    "other module": lambda loop: loop.model.append(nn.Linear(2, 2)),
    "same module twice": lambda loop: loop.model.append(loop.model[0]),
    "no module": lambda loop: assign(loop.model._modules, "0", None),
    "module instead of none": lambda loop: assign(loop.model._modules, "nobody", nn.Linear(2, 2)),
    "module of another name": lambda loop: assign(loop.model[2]._modules, "b", loop.model[2]._modules.pop("a")),
    "other buffer": lambda loop: loop.model[0].register_buffer("more", torch.ones(1)),
    "no bias": lambda loop: setattr(loop.model[0], "bias", None),
    "buffer is kept": lambda loop: loop.model._non_persistent_buffers_set.clear(),
    "other optimizer": lambda loop: setattr(loop, "optim", torch.optim.AdamW(loop.model.parameters())),
}
OWN_CODE: dict[str, Callable[[Loop], object]] = {
    "hook after": lambda loop: loop.model[0].register_state_dict_post_hook(lambda *_: None),
    "hook before": lambda loop: loop.model[0].register_state_dict_pre_hook(lambda *_: None),
    "hook of the optimizer": lambda loop: loop.optim.register_state_dict_post_hook(lambda *_: None),
    "own way of one module": lambda loop: setattr(loop.model[1], "state_dict", dict),
    "sparse": lambda loop: assign(loop.kept, "exp_avg", torch.zeros(2, 2).to_sparse()),
    "own way of a class": lambda loop: loop.model.append(OwnState()),
    "own state of the optimizer": lambda loop: setattr(loop, "optim", OwnOptimizer(loop.model.parameters())),
    "list": lambda loop: assign(loop.kept, "exp_avg", [torch.zeros(2)]),
}


@pytest.fixture(params=["compiled", "columns"])
def described(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layouts are described by compiled code, or by calls of torch for each property, as with torch 2.6."""
    if request.param == "columns":
        monkeypatch.setattr(fused, "IS_BUILT", False)
    elif not fused.IS_BUILT or not exchange():
        pytest.skip("needs a C compiler and a torch that describes tensors to compiled code")


@pytest.mark.usefixtures("described")
@pytest.mark.parametrize("change", NOTICED)
def test_a_change_is_noticed(change: str) -> None:
    loop = Loop()
    before, again = loop.fingerprint(), loop.fingerprint()
    assert before.complete
    assert before.marks == again.marks
    NOTICED[change](loop)
    after = loop.fingerprint()
    assert after.complete
    assert after.marks != before.marks
    assert after.marks == loop.fingerprint().marks


@pytest.mark.usefixtures("described")
@pytest.mark.parametrize("change", OWN_CODE)
def test_objects_that_produce_their_state_by_code_of_their_own_have_no_complete_fingerprint(change: str) -> None:
    loop = Loop()
    OWN_CODE[change](loop)
    assert not loop.fingerprint().complete


def test_a_step_changes_no_fingerprint() -> None:
    loop = Loop()
    before = loop.fingerprint()
    loop.optim.step()
    loop.model[1].running_mean.add_(1.0)
    assert loop.fingerprint().marks == before.marks


def test_nothing_of_a_loop_is_held_between_saves(checkpointer: Checkpointer) -> None:
    loop = Loop()
    for step in range(3):
        checkpointer.save(loop.model, loop.optim, step)
    checkpointer.wait()
    held = [weakref.ref(one) for one in (loop.model[0], loop.weight, loop.kept["exp_avg"], loop.optim)]
    del loop
    gc.collect()
    assert [one() for one in held] == [None] * len(held)


def test_saves_follow_a_structure_that_changes(tmp_path: Path) -> None:
    """Descriptions are used again from save to save; each of these changes what is to be described."""
    loop = TrainingLoop(OPTIMIZERS["adamw"])
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
    with open_run(tmp_path, overlap=False) as reference, open_run(tmp_path / "again") as checkpointer:
        for step, change in enumerate(changes):
            change()
            states.append(checkpointer.save(model, loop.optim, step))
            reference._saves.agreement._capturer = Capturer()
            reference._saves.agreement._agreement = None
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
