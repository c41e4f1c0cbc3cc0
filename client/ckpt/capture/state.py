"""Capture: everything one save consists of, from the objects of the training loop. Copies nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer

from ckpt.capture.leaves import Captured, Collector
from ckpt.capture.modules import gradients, module_state, parameter_names
from ckpt.capture.optimizers import optimizer_state
from ckpt.capture.rng import rng_state
from ckptstore.errors import InvalidRequest

MODEL = "model"
OPTIMIZER = "optim"
GRADIENTS = "grads"
RNG = "rng"
RESERVED = (MODEL, OPTIMIZER, GRADIENTS, RNG)

Optimizers = Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer]


@runtime_checkable
class Stateful(Protocol):
    """Anything that can say and take back its state: schedulers, scalers, data loaders, your own."""

    def state_dict(self) -> Any:
        """The state, as plain data, tensors and arrays."""

    def load_state_dict(self, state: Any) -> Any:
        """Take a state back."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The objects of a training loop that are saved or restored together."""

    model: nn.Module | None
    optimizers: Mapping[str, Optimizer]
    """By item name: optim, or optim.0, optim.1, or optim.<key>."""
    extras: Mapping[str, Any]

    @staticmethod
    def of(model: nn.Module | None, optim: Optimizers | None, extras: Mapping[str, Any]) -> Subject:
        """Raises InvalidRequest for objects of the wrong kind or reserved names."""
        if model is not None and not isinstance(model, nn.Module):
            raise InvalidRequest(f"model is a {type(model).__name__}", "Pass a torch.nn.Module")
        for name in extras:
            if name in RESERVED or name.startswith(f"{OPTIMIZER}."):
                raise InvalidRequest(f"the name {name!r} is reserved", "Use another keyword")
        return Subject(model, _named_optimizers(optim), dict(extras))

    @property
    def modules(self) -> dict[str, nn.Module]:
        """All modules by item name; the model first."""
        extras = {name: value for name, value in self.extras.items() if isinstance(value, nn.Module)}
        return {**({MODEL: self.model} if self.model is not None else {}), **extras}

    @property
    def others(self) -> dict[str, Any]:
        """Extras that are not modules: kept per rank."""
        return {name: value for name, value in self.extras.items() if not isinstance(value, nn.Module)}

    def parameter_names(self) -> dict[int, str]:
        """id of each parameter of each module to its name; those of further modules carry the item's name."""
        names: dict[int, str] = {}
        for item, module in self.modules.items():
            prefix = "" if item == MODEL else f"{item}."
            for key, name in parameter_names(module).items():
                names.setdefault(key, prefix + name)
        return names


@torch.no_grad()
def capture(subject: Subject, rank: int, grads: bool) -> Captured:
    """Name every leaf of the state. Modules and optimizers are taken from rank 0, all else from each rank.

    grads: take the gradients too, for a save in the middle of an accumulation window; they differ between ranks.
    Raises UnsupportedObject for what cannot be stored.
    """
    collector = Collector(rank)
    names = subject.parameter_names()
    if rank == 0:
        for item, module in subject.modules.items():
            collector.add_shared(item, module_state(module))
        for item, optimizer in subject.optimizers.items():
            collector.add_shared(item, optimizer_state(optimizer, names))
    if grads and subject.model is not None:
        collector.add_local(GRADIENTS, gradients(subject.model))
    collector.add_local(RNG, rng_state())
    for item, value in subject.others.items():
        collector.add_local(item, value.state_dict() if isinstance(value, Stateful) else value)
    return collector.captured


def _named_optimizers(optim: Optimizers | None) -> dict[str, Optimizer]:
    if optim is None:
        return {}
    if isinstance(optim, Optimizer):
        return {OPTIMIZER: optim}
    keyed = optim.items() if isinstance(optim, Mapping) else enumerate(optim)
    named = {f"{OPTIMIZER}.{key}": optimizer for key, optimizer in keyed}
    for item, optimizer in named.items():
        if not isinstance(optimizer, Optimizer):
            raise InvalidRequest(f"{item} is a {type(optimizer).__name__}", "Pass torch.optim.Optimizer objects")
    return named
