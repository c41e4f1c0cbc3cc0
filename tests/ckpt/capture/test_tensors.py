"""Wrapper subclasses: tensors of tensors, with no memory of their own. None is taken for another one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ckpt import Checkpointer
from ckpt.capture.parts import memory_address
from ckptstore.errors import StateMismatch, UnsupportedObject
from tests.ckpt.capture.wrapped_ranks import inner_values, model_of_pairs, pair, step, wrap
from tests.support.parallel.runner import Outcome, Scenario, run_scenarios

_SCENARIOS = ("two_tensors", "float8", "scaled")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    folder = tmp_path_factory.mktemp("wrapped")
    scenarios = [
        Scenario(f"tests.ckpt.capture.wrapped_ranks:{name}", 2, {"store": str(folder / f"store-{name}")}, 120.0)
        for name in _SCENARIOS
    ]
    (folder / "run").mkdir()
    return dict(zip(_SCENARIOS, run_scenarios(scenarios, folder / "run"), strict=True))


def test_sharded_wrappers_of_one_shape_are_restored_each_with_its_optimizer_state(outcomes: dict[str, Outcome]) -> None:
    for result in outcomes["two_tensors"].result():
        assert result["alike"] == [True, True]
        assert result["names"] == [f"model/w{i}/{inner}" for i in range(3) for inner in "ab"]


def test_float8_shards_of_torchao_are_restored_without_stale_scales(outcomes: dict[str, Outcome]) -> None:
    for result in outcomes["float8"].result():
        assert result["alike"] == [True, True]
        assert result["no stale scales"]
        assert result["names"] == [f"model/{i}.weight/_tensor" for i in range(3)]


def test_a_sharded_wrapper_whose_scale_has_another_shape_is_refused_by_name(outcomes: dict[str, Outcome]) -> None:
    for said in outcomes["scaled"].result():
        assert said.startswith("UnsupportedObject")
        assert "'model/w'" in said
        assert "TwoTensor" in said


def test_unsharded_wrappers_are_restored_in_place(tmp_path: Path) -> None:
    model, other = model_of_pairs(1.0), model_of_pairs(5.0)
    optim, other_optim = (torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, other))
    step(model, optim)
    memory = [memory_address(parameter) for parameter in other.parameters()]
    with Checkpointer(str(tmp_path), run="r") as checkpointer:
        checkpointer.save(model, optim, 1)
        checkpointer.restore(other, other_optim)
    assert [memory_address(parameter) for parameter in other.parameters()] == memory
    step(model, optim)
    step(other, other_optim)
    assert inner_values(other) == inner_values(model)


def test_a_wrapper_does_not_fit_a_plain_tensor(tmp_path: Path) -> None:
    plain = nn.Module()
    for name, parameter in model_of_pairs(1.0).named_parameters():
        plain.register_parameter(name, nn.Parameter(torch.zeros(parameter.shape)))
    with Checkpointer(str(tmp_path), run="plain") as checkpointer:
        checkpointer.save(plain, None, 1)
        with pytest.raises(StateMismatch, match="TwoTensor"):
            checkpointer.restore(model_of_pairs(1.0))
    with Checkpointer(str(tmp_path), run="wrapped") as checkpointer:
        checkpointer.save(model_of_pairs(1.0), None, 1)
        with pytest.raises(StateMismatch, match="model/w0"):
            checkpointer.restore(plain)


def test_wrappers_among_extras_are_refused_by_name(tmp_path: Path) -> None:
    refused = pytest.raises(UnsupportedObject, match=r"'average'.*TwoTensor")
    with Checkpointer(str(tmp_path), run="r") as checkpointer, refused:
        checkpointer.save(model_of_pairs(1.0), None, 1, average=pair(1.0, 2, 2))


def test_a_parameter_whose_memory_is_freed_is_refused_by_name(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    model.weight.untyped_storage().resize_(0)
    refused = pytest.raises(UnsupportedObject, match=r"'model/weight' has 64 elements but no memory")
    with Checkpointer(str(tmp_path), run="r") as checkpointer, refused:
        checkpointer.save(model, None, 1)


def test_inner_tensors_are_told_apart_by_their_memory(tmp_path: Path) -> None:
    shared = torch.ones(4, 4)
    model = nn.Module()
    for name, value in {"first": 2.0, "second": 3.0}.items():
        model.register_parameter(name, nn.Parameter(wrap(shared, torch.full((4, 4), value))))
    with Checkpointer(str(tmp_path), run="r") as checkpointer:
        checkpointer.save(model, None, 1)
        found = {name: tensor[0, 0].item() for name, tensor in checkpointer.load(1).items()}
    assert found == {"model/first/a": 1.0, "model/first/b": 2.0, "model/second/a": 1.0, "model/second/b": 3.0}
