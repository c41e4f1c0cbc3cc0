"""Ways in which user code changes the state of a training loop after save_async, for the lives of test_mutations.py."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import nn

Undo = Callable[[], None]


class Subject:
    """The objects of a training loop. A mutation may replace or drop them."""

    def __init__(self, sizes: list[tuple[int, ...]], kind: str) -> None:
        self.model: Any = nn.ParameterList(torch.randn(size) for size in sizes)
        if len(sizes) > 2:
            self.model[1].data = torch.randn(sizes[1]).reshape(2, -1).t()  # not contiguous
            self.model[2].requires_grad_(False)
        self.model.register_buffer("mean", torch.randn(5000))
        self.ema: Any = nn.ParameterList([torch.randn(100), torch.randn(70_000)])  # small: copied at every call
        trained = [parameter for parameter in self.model if parameter.requires_grad]
        makers: dict[str, Callable[..., Any]] = {
            "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
            "foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
            "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
        }
        self.optim: Any = makers[kind](trained)
        self.steps = True
        """Whether the optimizer can make another step."""
        self.step()

    def step(self) -> None:
        for parameter in self.model:
            if parameter.requires_grad:
                parameter.grad = torch.randn_like(parameter)
        self.optim.step()

    def state(self) -> dict[str, torch.Tensor]:
        """A copy, by the names of entries."""
        found = {f"model/{name}": value for name, value in self.model.state_dict().items()}
        found |= {f"ema/{name}": value for name, value in self.ema.state_dict().items()}
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for parameter, state in self.optim.state.items():
            values = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
            found |= {f"optim/state/{names[id(parameter)]}/{key}": value for key, value in values.items()}
        return {name: value.detach().clone() for name, value in found.items()}

    def any_parameter(self, rng: random.Random) -> Any:
        """Large ones more often: small ones are copied at the call."""
        numbers = range(len(self.model))
        return self.model[rng.choices(numbers, [parameter.numel() for parameter in self.model])[0]]


Change = Callable[[Subject, random.Random, bool], Undo | None]


@dataclass(frozen=True)
class Mutation:
    change: Change
    """The last argument: whether every change is to be detected, also one that samples miss."""
    harmless: bool = False
    """The memory of the call is left alone, or kept until it is copied: the save is committed all the same."""
    waits: bool = False
    """The call may wait for the copy."""
    races: bool = True
    """The change is allowed while the copier reads."""


def _set_back(parameters: list[Any], values: list[torch.Tensor]) -> Undo:
    def undo() -> None:
        for parameter, value in zip(parameters, values, strict=True):
            parameter.data.copy_(value)

    return undo


def _of_one(change: Callable[[Any], object], undoes: bool = False, steps: bool = True) -> Change:
    """A change of any parameter. Without `steps`, the optimizer makes none afterwards."""

    def mutate(subject: Subject, rng: random.Random, every: bool) -> Undo | None:
        subject.steps &= steps
        parameter = subject.any_parameter(rng)
        before = parameter.detach().clone() if undoes else None
        with torch.no_grad():
            change(parameter)
        if before is not None:
            return _set_back([parameter], [before])
        _churn(subject)
        return None

    return mutate


def _part_by_numpy(subject: Subject, rng: random.Random, every: bool) -> Undo:
    """The sampled places include the first element."""
    parameter = subject.any_parameter(rng)
    before, view = parameter.detach().clone(), parameter.detach().numpy()
    begin = rng.randrange(len(view)) if every else 0
    view[begin : begin + rng.randint(1, len(view))] = 7.0
    return _set_back([parameter], [before])


def _optimizer_state(subject: Subject, rng: random.Random, every: bool) -> None:
    for state in subject.optim.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.data.fill_(7.0)


def _copied_average(subject: Subject, rng: random.Random, every: bool) -> Undo:
    parameters = list(subject.model)
    raw = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        parameter.data.copy_(parameter.data + 1)
    return _set_back(parameters, raw)


def _exchanged_average(subject: Subject, rng: random.Random, every: bool) -> Undo:
    parameters = list(subject.model)
    raw = [parameter.data for parameter in parameters]
    for parameter in parameters:
        parameter.data = parameter.data + 1

    def undo() -> None:
        for parameter, value in zip(parameters, raw, strict=True):
            parameter.data = value

    return undo


def _convert(subject: Subject, rng: random.Random, every: bool) -> None:
    subject.steps = False
    subject.model.to(torch.bfloat16)
    _churn(subject)


def _put(parameter: Any) -> None:
    queue: Any = mp.get_context("spawn").SimpleQueue()
    queue.put(parameter.data)
    queue.get()
    queue.close()


def _free(subject: Subject, rng: random.Random, every: bool) -> None:
    subject.steps = False
    subject.model = subject.optim = subject.ema = None
    _churn(subject)


def _load(subject: Subject, rng: random.Random, every: bool) -> None:
    subject.model.load_state_dict({name: value + 1 for name, value in subject.model.state_dict().items()})


def _load_optimizer(subject: Subject, rng: random.Random, every: bool) -> None:
    subject.optim.load_state_dict(copy.deepcopy(subject.optim.state_dict()))
    _churn(subject)


def _buffers(subject: Subject, rng: random.Random, every: bool) -> None:
    subject.model.mean.fill_(7.0)
    for parameter in subject.ema:
        parameter.data.fill_(7.0)


def _churn(subject: Subject) -> None:
    """Use memory again that was freed."""
    gc.collect()
    for size in (1 << 12, 1 << 16, 1 << 20):
        for _ in range(4):
            torch.full((size,), float("nan"))


MUTATIONS: dict[str, Mutation] = {
    "nothing": Mutation(lambda *_: None, harmless=True),
    "in place": Mutation(_of_one(lambda p: p.mul_(0.5), undoes=True)),
    "past the counter": Mutation(_of_one(lambda p: p.data.fill_(7.0), undoes=True)),
    "part by numpy": Mutation(_part_by_numpy),
    "optimizer state": Mutation(_optimizer_state),
    "average, copied": Mutation(_copied_average),
    "average, exchanged": Mutation(_exchanged_average, harmless=True),
    "replace": Mutation(_of_one(lambda p: setattr(p, "data", torch.full_like(p, 7.0))), harmless=True),
    "convert": Mutation(_convert, harmless=True),
    "resize storage": Mutation(
        _of_one(lambda p: p.untyped_storage().resize_(0), steps=False), harmless=True, waits=True
    ),
    "resize tensor": Mutation(_of_one(lambda p: p.data.resize_(2 * p.numel()), steps=False), races=False),
    "share": Mutation(_of_one(lambda p: p.data.share_memory_()), harmless=True, waits=True),
    "put": Mutation(_of_one(_put), harmless=True, waits=True),
    "free": Mutation(_free, harmless=True),
    "load": Mutation(_load),
    "load optimizer": Mutation(_load_optimizer, harmless=True),
    "set": Mutation(_of_one(lambda p: p.set_(torch.full_like(p, 7.0)))),
    "buffers": Mutation(_buffers, harmless=True),
    "step": Mutation(lambda subject, *_: subject.step(), harmless=True, waits=True),
}
