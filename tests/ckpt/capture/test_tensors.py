"""Wrapper subclasses: tensors of tensors, with no memory of their own. None is taken for another one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.two_tensor import TwoTensor

from ckpt import Checkpointer
from ckpt.capture.parts import memory_address
from ckptstore.errors import StateMismatch, UnsupportedObject
from tests.support.parallel.runner import Outcome, Scenario, run_scenarios
from tests.support.training import same_state

_SCENARIOS = ("two_tensors", "float8", "scaled")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    folder = tmp_path_factory.mktemp("wrapped")
    scenarios = [
        Scenario(f"{__name__}:{name}", 2, {"store": str(folder / f"store-{name}")}, 120.0) for name in _SCENARIOS
    ]
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


def test_unsharded_wrappers_are_restored_in_place(checkpointer: Checkpointer) -> None:
    model, other = model_of_pairs(1.0), model_of_pairs(5.0)
    optim, other_optim = (torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, other))
    step(model, optim)
    memory = [memory_address(parameter) for parameter in other.parameters()]
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
    with Checkpointer(str(tmp_path), run="plain", writer="thread") as checkpointer:
        checkpointer.save(plain, None, 1)
        with pytest.raises(StateMismatch, match="TwoTensor"):
            checkpointer.restore(model_of_pairs(1.0))
    with Checkpointer(str(tmp_path), run="wrapped", writer="thread") as checkpointer:
        checkpointer.save(model_of_pairs(1.0), None, 1)
        with pytest.raises(StateMismatch, match="model/w0"):
            checkpointer.restore(plain)


def test_a_wrapper_among_extras_and_a_parameter_whose_memory_is_freed_are_refused_by_name(
    checkpointer: Checkpointer,
) -> None:
    with pytest.raises(UnsupportedObject, match=r"'average'.*TwoTensor"):
        checkpointer.save(model_of_pairs(1.0), None, 1, average=pair(1.0, 2, 2))
    model = nn.Linear(8, 8)
    model.weight.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedObject, match=r"'model/weight' has 64 elements but no memory"):
        checkpointer.save(model, None, 1)


def lazy() -> torch.Tensor:
    warnings.simplefilter("ignore")
    return nn.LazyLinear(2).weight


NOT_STORABLE: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.eye(4).to_sparse(),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "zero": lambda: torch._efficientzerotensor(5),
    "mkldnn": lambda: torch.ones(4, 4).to_mkldnn(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "meta": lambda: torch.ones(3, device="meta"),
    "lazy": lazy,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", NOT_STORABLE)
def test_tensors_without_elements_in_memory_are_refused_by_name(checkpointer: Checkpointer, kind: str) -> None:
    """Where they are saved; what state_dict leaves out does not matter."""
    odd, aside = nn.Linear(2, 2), nn.Linear(2, 2)
    odd.register_buffer("odd", NOT_STORABLE[kind]())
    aside.register_buffer("odd", NOT_STORABLE[kind](), persistent=False)
    optim = torch.optim.SGD(aside.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(UnsupportedObject, match="model/odd"):
        checkpointer.prepare(odd, None)
    with pytest.raises(UnsupportedObject, match="model/odd"):
        checkpointer.save(odd, None, 1)
    with pytest.raises(UnsupportedObject, match="extra/x"):
        checkpointer.save(aside, optim, 1, extra={"x": NOT_STORABLE[kind]()})
    assert checkpointer.restore(aside, optim) is None, "nothing was committed"
    for number in (1, 2, 3):
        step(aside, optim)
        checkpointer.save(aside, optim, number)
    assert checkpointer.restore(aside, optim) is not None


class Point(nn.Parameter):
    """As libraries for manifolds have them: dense, with an attribute."""

    radius: float

    def __new__(cls, data: torch.Tensor, radius: float) -> Point:
        made = torch.Tensor._make_subclass(cls, data, True)
        made.radius = radius
        return made


class Noted(torch.Tensor):
    """A subclass whose operations return it."""


def test_plain_subclasses_are_stored_as_their_elements(checkpointer: Checkpointer) -> None:
    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Linear(4, 4)
        model.bias = Point(torch.randn(4), float(seed))
        model.register_buffer("note", torch.randn(3).as_subclass(Noted))
        with torch.inference_mode():
            model.register_buffer("inferred", torch.randn(3))
        optim = torch.optim.AdamW(model.parameters())
        step(model, optim)
        return model, optim

    (model, optim), (other, other_optim) = make(1), make(2)
    checkpointer.save(model, optim, 1, mark=torch.ones(3).as_subclass(Noted))
    mark = torch.zeros(3).as_subclass(Noted)
    checkpointer.restore(other, other_optim, mark=mark)
    assert same_state(other.state_dict(), model.state_dict())
    assert same_state(other_optim.state_dict(), optim.state_dict())
    assert type(other.bias) is Point
    assert other.bias.radius == 2.0
    assert type(other.note) is Noted
    assert type(mark) is Noted
    assert mark.tolist() == [1.0] * 3


def test_inner_tensors_are_told_apart_by_their_memory(checkpointer: Checkpointer) -> None:
    shared, model = torch.ones(4, 4), nn.Module()
    for name, value in {"first": 2.0, "second": 3.0}.items():
        model.register_parameter(name, nn.Parameter(wrap(shared, torch.full((4, 4), value))))
    checkpointer.save(model, None, 1)
    found = {name: tensor[0, 0].item() for name, tensor in checkpointer.load(1).items()}
    assert found == {"model/first/a": 1.0, "model/first/b": 2.0, "model/second/a": 1.0, "model/second/b": 3.0}


RUN = "wrapped"


def wrap(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = TwoTensor(first, second)  # type: ignore[no-untyped-call]
    return made


def pair(value: float, *shape: int) -> torch.Tensor:
    """A wrapper; its second tensor is the negative of the first."""
    first = value + torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    return wrap(first, -first)


def model_of_pairs(value: float) -> nn.Module:
    """Parameters of one shape, so that confusing two of them is possible."""
    model = nn.Module()
    for i in range(3):
        model.register_parameter(f"w{i}", nn.Parameter(pair(value + 100 * i, 6, 4)))
    return model


def inner_values(model: nn.Module) -> dict[str, Any]:
    found = {}
    for name, parameter in model.named_parameters():
        local: Any = parameter._local_tensor if hasattr(parameter, "_local_tensor") else parameter
        found[name] = [getattr(local, inner).tolist() for inner in local.__tensor_flatten__()[0]]
    return found


def step(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    """A step with gradients that differ between parameters."""
    for i, parameter in enumerate(model.parameters()):
        parameter.grad = torch.ones_like(parameter) * (i + 1)
    optim.step()


def two_tensors(store: str) -> dict[str, Any]:
    """Save between steps, restore into a model that made another number of steps, and continue both."""
    mesh, rounds = init_device_mesh("cpu", (2,)), []
    model = model_of_pairs(1.0)
    fully_shard(model, mesh=mesh)
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    with Checkpointer(store, run=RUN, writer="thread") as checkpointer:
        for number in range(3):
            step(model, optim)
            checkpointer.save_async(model, optim, number)
        step(model, optim)
        checkpointer.wait()
        for steps in range(2):
            other = model_of_pairs(7.0)
            fully_shard(other, mesh=mesh)
            other_optim = torch.optim.AdamW(other.parameters(), lr=0.1)
            for _ in range(steps):
                step(other, other_optim)
            checkpointer.restore(other, other_optim, checkpoint=2)
            step(other, other_optim)
            rounds.append(inner_values(other) == inner_values(model))
        names = sorted(checkpointer.load(2, "model/*"))
    return {"alike": rounds, "names": names}


def float8(store: str) -> dict[str, Any]:
    """torchao's float8 all-gather: the local shard is a wrapper, whose cached scale is no state."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp

    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3)))
        convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True))
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(model: Any, optim: torch.optim.Optimizer) -> None:
        step(model, optim)
        precompute_float8_dynamic_scale_for_fsdp(model)

    def weights(model: Any) -> list[Any]:
        return [parameter._local_tensor._tensor.tolist() for parameter in model.parameters()]

    model, optim = make(0)
    with Checkpointer(store, run=RUN, writer="thread") as checkpointer:
        checkpointer.prepare(model, optim)
        for number in range(3):
            checkpointer.save_async(model, optim, number)
            train(model, optim)
        checkpointer.save(model, optim, 3)
        alike, scales = [], []
        for steps in range(2):
            other, other_optim = make(1)
            for _ in range(steps):
                train(other, other_optim)
            checkpointer.restore(other, other_optim)
            locals_: list[Any] = [parameter._local_tensor for parameter in other.parameters()]  # type: ignore[attr-defined]
            scales += [local._precomputed_scale is None for local in locals_]
            alike.append(weights(other) == weights(model))
        entries = sorted(checkpointer.load(3, "model/*"))
    return {"alike": alike, "no stale scales": all(scales), "names": entries}


def scaled(store: str) -> str:
    """A sharded wrapper with an inner tensor of another shape: no placement describes it."""
    from torch.distributed.tensor import DTensor, Shard

    model = nn.Module()
    sharded: Any = nn.Parameter(DTensor.from_local(pair(1.0, 4, 4), init_device_mesh("cpu", (2,)), [Shard(0)]))
    sharded._local_tensor.b = torch.ones(4)
    model.w = sharded
    with Checkpointer(store, run=RUN, writer="thread") as checkpointer:
        try:
            checkpointer.save(model, None, 0)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "saved"
