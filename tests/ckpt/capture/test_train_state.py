from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt import Checkpointer
from ckpt.capture.describe import describe
from ckpt.capture.leaves import Change
from ckpt.capture.ownership import agree
from ckpt.capture.state import Capturer, StateFingerprint
from ckpt.capture.train_state import TrainState
from ckptstore.errors import InvalidRequest
from tests.support.training import same_state


class Counted(nn.Module):
    """A model with a tied weight, a frozen one and a buffer, that counts the calls of its state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.register_buffer("mean", torch.zeros(2))
        self.calls = 0
        self.register_state_dict_pre_hook(self._count)  # type: ignore[no-untyped-call]

    def _count(self, *_: Any) -> None:
        self.calls += 1


class Wrapper:
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner


class Lookahead(torch.optim.Optimizer):
    """Its state_dict lacks the state of the optimizer inside."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner


def trained(model: nn.Module) -> torch.optim.Optimizer:
    own = nn.Parameter(torch.zeros(3))  # belongs to no module
    optim = torch.optim.AdamW([*(p for p in model.parameters() if p.requires_grad), own])
    for group in optim.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optim.step()
    return optim


def test_leaves_know_their_names_and_when_they_change() -> None:
    model = Counted()
    state = TrainState.of(model, trained(model), {})
    assert [(leaf.name, leaf.change) for leaf in state.leaves("model")] == [
        ("frozen", Change.NEVER), ("mean", Change.ANY_TIME), ("first.weight", Change.STEP),
        ("second.weight", Change.STEP),
    ]  # fmt: skip


def test_the_leaves_of_an_optimizer_have_the_units_of_their_parameters() -> None:
    model = Counted()
    (optimizer,) = TrainState.of(model, trained(model), {}).named_optimizers["optim"]
    assert {name: leaf.unit for name, leaf in optimizer.leaves.items()} == {
        "first.weight": "model/first.weight",
        "group0.param1": "optim/group0.param1",
    }


def test_parameters_of_other_modules_have_the_name_of_their_item_in_optimizers() -> None:
    other = nn.Linear(2, 2)
    state = TrainState.of(Counted(), {"d": torch.optim.SGD(other.parameters(), lr=0.1)}, {"disc": other})
    (optimizer,) = state.named_optimizers["optim.d"]
    assert {name: leaf.unit for name, leaf in optimizer.leaves.items()} == {
        "disc.weight": "disc/weight",
        "disc.bias": "disc/bias",
    }


def test_a_save_asks_a_module_for_its_state_once() -> None:
    model = Counted()
    state = TrainState.of(model, trained(model), {})
    ownership = agree(0, [describe(state, sampled=True)], split_replicas=False)
    assert model.calls == 1
    captured = Capturer().capture(state, ownership, grads=True)
    assert (model.calls, captured.aliases) == (2, {"model/second.weight": "model/first.weight"})
    assert {entry.entry for entry in captured.leaves.slices} >= {"model/mean", "optim/state/group0.param1/exp_avg"}


def test_chunks_may_share_a_tensor_and_not_a_name() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(InvalidRequest, match="different tensors under the name 'weight'"):
        TrainState.of([first, second], None, {}).leaves("model")
    second.weight, second.bias = first.weight, first.bias
    assert [leaf.name for leaf in TrainState.of([first, second], None, {}).leaves("model")] == ["weight", "bias"]


def test_several_models_by_name_are_one_with_their_names_in_front(tmp_path: Path) -> None:
    def models() -> tuple[dict[str, nn.Module], dict[str, torch.optim.Optimizer]]:
        found: dict[str, nn.Module] = {"G": nn.Linear(2, 2), "D": nn.Linear(2, 2)}
        return found, {name: trained(model) for name, model in found.items()}

    saved, again = models(), models()
    marks = [StateFingerprint(TrainState.of(saved[0], saved[1], {})) for _ in range(2)]
    assert marks[0].complete
    assert marks[0].marks == marks[1].marks, "and described once"
    with Checkpointer(tmp_path.as_uri(), run="gan", writer="thread") as run:
        run.save(*saved, 1, grads=True)
        run.restore(*again)
    assert same_state(
        {"G": saved[0]["G"].state_dict(), "D": saved[0]["D"].state_dict()},
        {"G": again[0]["G"].state_dict(), "D": again[0]["D"].state_dict()},
    )
    assert torch.equal(next(again[0]["D"].parameters()).grad, next(saved[0]["D"].parameters()).grad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("of", "said"),
    [
        (lambda m, _: (m.state_dict(), None, {}), r"state_dict.*torch.nn.Module"),
        (lambda m, o: (m, o.state_dict(), {}), r"not their state_dict"),
        (lambda m, o: (m, Wrapper(o), {}), r"is a Wrapper. Pass its .inner"),
        (lambda m, o: (m, {"a": Lookahead(o)}, {}), r"is a Lookahead. Pass its .inner"),
        (lambda m, _: ({"a.b": m}, None, {}), r"without dots"),
        (lambda m, _: (m, None, {"tags": {"best": True}}), r"no option 'tags'"),
        (lambda m, _: (m, None, {"step": 3}), r"no option 'step'.*checkpoint="),
    ],
)
def test_what_is_passed_by_mistake_is_refused_with_what_to_pass(of: Callable[..., Any], said: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(InvalidRequest, match=said):
        TrainState.of(*of(model, trained(model)))
