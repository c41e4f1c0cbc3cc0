"""The subject of a save or restore: the objects of a training loop, by the names their state is kept under."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer

from ckpt.capture import modules
from ckpt.capture.parts import Flat
from ckptstore.errors import InvalidRequest

MODEL = "model"
OPTIMIZER = "optim"
GRADIENTS = "grads"
RNG = "rng"
RESERVED = (MODEL, OPTIMIZER, GRADIENTS, RNG)

Model = nn.Module | Sequence[nn.Module]
Optimizers = Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer]


@runtime_checkable
class Stateful(Protocol):
    """Anything that can say and take back its state: schedulers, scalers, data loaders, your own."""

    def state_dict(self) -> Any:
        """The state, as plain data, tensors and arrays."""

    def load_state_dict(self, state: Any) -> Any:
        """Take a state back."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """The live parameters of all modules, by id."""

    names: Mapping[int, str]
    """Under which optimizers' state is kept."""
    units: Mapping[int, str]
    """Of ownership: item/name."""
    flats: Mapping[int, Flat]
    """What FSDP1 keeps here of those that it flattens."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The objects of a training loop that are saved or restored together."""

    modules: Mapping[str, tuple[nn.Module, ...]]
    """By item name, the model first; several chunks of one rank's pipeline stages are one item."""
    optimizers: Mapping[str, tuple[Optimizer, ...]]
    """By item name: optim, or optim.<key>."""
    others: Mapping[str, Any]
    """Extras that are not modules: kept per rank."""

    @staticmethod
    def of(model: Model | None, optim: Optimizers | None, extras: Mapping[str, Any]) -> Subject:
        """Raises InvalidRequest for objects of the wrong kind or reserved names."""
        for name in extras:
            if name in RESERVED or name.startswith(f"{OPTIMIZER}."):
                raise InvalidRequest(f"the name {name!r} is reserved", "Use another keyword")
        found = {} if model is None else {MODEL: _chunks(model)}
        found |= {name: (value,) for name, value in extras.items() if isinstance(value, nn.Module)}
        others = {name: value for name, value in extras.items() if not isinstance(value, nn.Module)}
        return Subject(found, _named_optimizers(optim), others)

    def reshard(self) -> None:
        """Have every parameter in the form in which optimizers know it. Local."""
        modules.reshard(chunk for chunks in self.modules.values() for chunk in chunks)

    def parameters(self) -> Parameters:
        """What is known of the live parameters; those of further modules carry the item's name."""
        names: dict[int, str] = {}
        units: dict[int, str] = {}
        flats: dict[int, Flat] = {}
        for item, chunks in self.modules.items():
            prefix = "" if item == MODEL else f"{item}."
            for name, parameter in _joined(item, chunks, modules.named_parameters).items():
                names.setdefault(id(parameter), prefix + name)
                units.setdefault(id(parameter), f"{item}/{name}")
            for chunk in chunks:
                flats |= modules.flat_parameters(chunk)
        return Parameters(names, units, flats)

    def gradients(self) -> dict[str, tuple[nn.Parameter, torch.Tensor]]:
        """The model's parameters that have a gradient, and these, by name."""
        chunks = self.modules.get(MODEL, ())
        modules.check_reduced(chunks)
        named = _joined(MODEL, chunks, modules.named_parameters)
        return {name: (p, p.grad) for name, p in named.items() if p.grad is not None}

    def state(self, item: str) -> dict[str, Any]:
        """The joined state_dict of a module item, by canonical names."""
        return _joined(item, self.modules[item], lambda chunk: modules.module_state(chunk).items())


def _joined(
    item: str, chunks: Sequence[nn.Module], names: Callable[[nn.Module], Iterable[tuple[str, Any]]]
) -> dict[str, Any]:
    """What the chunks of one item hold, by name. Raises InvalidRequest if two use one name for different things."""
    joined: dict[str, Any] = {}
    for chunk in chunks:
        for name, value in names(chunk):
            known = joined.setdefault(name, value)
            same = known is value or (
                isinstance(known, torch.Tensor)
                and isinstance(value, torch.Tensor)
                and known.data_ptr() == value.data_ptr()
                and known.shape == value.shape
            )
            if not same:
                raise InvalidRequest(
                    f"two chunks of {item!r} hold different tensors under the name {name!r}",
                    "Keep the names that parameters have in the whole model",
                )
    return joined


def _chunks(model: Model) -> tuple[nn.Module, ...]:
    chunks = (model,) if isinstance(model, nn.Module) else tuple(model)
    for chunk in chunks:
        if not isinstance(chunk, nn.Module):
            raise InvalidRequest(f"model is a {type(chunk).__name__}", "Pass a torch.nn.Module, or several")
    return chunks


def _named_optimizers(optim: Optimizers | None) -> dict[str, tuple[Optimizer, ...]]:
    if optim is None:
        return {}
    named: dict[str, tuple[Optimizer, ...]]
    if isinstance(optim, Mapping):
        named = {f"{OPTIMIZER}.{key}": (optimizer,) for key, optimizer in optim.items()}
    else:
        named = {OPTIMIZER: (optim,) if isinstance(optim, Optimizer) else tuple(optim)}
    for item, found in named.items():
        for optimizer in found:
            if not isinstance(optimizer, Optimizer):
                raise InvalidRequest(f"{item} is a {type(optimizer).__name__}", "Pass torch.optim.Optimizer objects")
    return named
