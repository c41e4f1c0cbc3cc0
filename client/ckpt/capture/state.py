"""Capture: everything one save consists of, from the objects of the training loop. Copies nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, runtime_checkable

import torch
import xxhash
from torch import nn
from torch.optim import Optimizer

from ckpt.capture import modules, optimizers
from ckpt.capture.leaves import Captured, Collector, dtype_name, tensor_bytes
from ckpt.capture.ownership import Ownership, Unit
from ckpt.capture.parts import Flat, Part, part_of
from ckpt.capture.rng import rng_state
from ckptstore.documents import JSON
from ckptstore.errors import InvalidRequest
from ckptstore.trees import mapping, merge_trees

MODEL = "model"
OPTIMIZER = "optim"
GRADIENTS = "grads"
RNG = "rng"
RESERVED = (MODEL, OPTIMIZER, GRADIENTS, RNG)

Model = nn.Module | Sequence[nn.Module]
Optimizers = Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer]

_SAMPLE = 64  # elements of each parameter that are compared between ranks


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

    def parameter_names(self) -> dict[int, str]:
        """id of each parameter of each module to its name; those of further modules carry the item's name."""
        names: dict[int, str] = {}
        for item, chunks in self.modules.items():
            prefix = "" if item == MODEL else f"{item}."
            for name, parameter in _joined(item, chunks, modules.named_parameters).items():
                names.setdefault(id(parameter), prefix + name)
        return names

    def units(self) -> dict[int, str]:
        """id of each parameter to the unit of ownership it belongs to."""
        return {
            id(parameter): f"{item}/{name}"
            for item, chunks in reversed(list(self.modules.items()))
            for name, parameter in _joined(item, chunks, modules.named_parameters).items()
        }

    def flats(self) -> dict[int, Flat]:
        """What FSDP1 keeps here, by id of parameter."""
        chunks = (chunk for chunks in self.modules.values() for chunk in chunks)
        return {key: flat for chunk in chunks for key, flat in modules.flat_parameters(chunk).items()}

    def settle(self) -> None:
        """Have every parameter in the form in which optimizers know it."""
        modules.settle(chunk for chunks in self.modules.values() for chunk in chunks)

    def state(self, item: str) -> dict[str, Any]:
        """The joined state_dict of a module item, by canonical names."""
        return _joined(item, self.modules[item], lambda chunk: modules.module_state(chunk).items())


@torch.no_grad()
def describe(subject: Subject, sampled: bool) -> dict[str, Unit]:
    """What this rank holds of each parameter and buffer, for the agreement on who writes what.

    sampled: also digest some values of those whose placements do not tell whether ranks hold copies.
    """
    subject.settle()
    flats, units = subject.flats(), {}
    for item, chunks in subject.modules.items():
        trusted = not sampled or all(map(modules.is_replicated, chunks))
        buffers = {id(tensor) for chunk in chunks for tensor in _storages(modules.unwrap(chunk).buffers())}
        units[f"{item}#"] = _frame()
        for name, value in subject.state(item).items():
            path = f"{item}/{name}"
            if not isinstance(value, torch.Tensor):
                units[path] = _frame()
            elif unit := _unit(path, value, flats.get(id(value)), trusted, _storage(value) in buffers):
                units[path] = unit
    for item, found in subject.optimizers.items():
        units |= _optimizer_units(item, found, subject, sampled)
    return units


def _optimizer_units(item: str, found: Sequence[Optimizer], subject: Subject, sampled: bool) -> dict[str, Unit]:
    """The frame of an optimizer item; and the parameters whose state is not kept where they are."""
    names, of_module, units = subject.parameter_names(), subject.units(), {}
    units[_frame_name(item, found, names)] = _frame()
    for optimizer in found:
        for name, parameter in optimizers.parameters_by_name(optimizer, names).items():
            if optimizers.state_holder(optimizer) is not optimizer:
                if optimizers.keeps_state_here(optimizer, parameter):
                    units[f"{item}/{name}"] = Unit("", (), (), False, parameter.nbytes)
            elif id(parameter) not in of_module and (unit := _unit(name, parameter, None, not sampled, False)):
                units[f"{item}/{name}"] = unit
    return units


@torch.no_grad()
def capture(subject: Subject, ownership: Ownership, grads: bool) -> Captured:
    """Name every leaf of the state, and what of it this rank writes.

    grads: take the gradients too, for a save in the middle of an accumulation window; they differ between ranks,
    but for those of sharded parameters. Raises UnsupportedObject for what cannot be stored.
    """
    collector = Collector(ownership)
    flats, of_module, names = subject.flats(), subject.units(), subject.parameter_names()
    trees = collector.captured.trees
    for item in subject.modules:
        owned = {}
        for name, value in subject.state(item).items():
            unit = f"{item}/{name}"
            tree = collector.shared(unit, unit, value, flats.get(id(value)))
            if ownership.owns(unit):
                owned[name] = tree
        if owned or ownership.owns(f"{item}#"):
            trees[item] = mapping(owned)
    for item, found in subject.optimizers.items():
        _capture_optimizers(collector, ownership, item, found, (names, of_module, flats))
    if grads and MODEL in subject.modules:
        _capture_gradients(collector, ownership, subject, flats)
    collector.add_local(RNG, rng_state())
    for item, value in subject.others.items():
        collector.add_local(item, value.state_dict() if isinstance(value, Stateful) else value)
    return collector.captured


def _capture_optimizers(
    collector: Collector,
    ownership: Ownership,
    item: str,
    found: Sequence[Optimizer],
    known: tuple[Mapping[int, str], Mapping[int, str], Mapping[int, Flat]],
) -> None:
    names, of_module, flats = known
    owns_frame = ownership.owns(_frame_name(item, found, names))
    owned: dict[str, JSON] = {}
    seen: set[str] = set()
    frames: JSON = {}
    for optimizer in found:
        state = optimizers.optimizer_state(optimizer, names)
        parameters = optimizers.parameters_by_name(optimizer, names)
        for name, values in state.pop("state").items():
            if name in seen:
                raise InvalidRequest(
                    f"two optimizers keep state for the parameter {name!r}", "Pass them as a mapping: {name: optimizer}"
                )
            seen.add(name)
            key = id(parameters.get(name))
            unit = f"{item}/{name}"
            if optimizers.state_holder(optimizer) is optimizer:
                unit = of_module.get(key, unit) if name in parameters else _frame_name(item, found, names)
            tree = collector.shared(unit, f"{item}/state/{name}", values, flats.get(key))
            if ownership.owns(unit):
                owned[name] = tree
        if owns_frame:
            frames = merge_trees(frames, collector.inline(item, state), item)
    if owned or owns_frame:
        collector.captured.trees[item] = mapping({"state": mapping(owned), **({"groups": []} | frames)})


def _capture_gradients(collector: Collector, ownership: Ownership, subject: Subject, flats: Mapping[int, Flat]) -> None:
    """Gradients of sharded parameters are sharded alike; all others belong to their rank."""
    parameters = _joined(MODEL, subject.modules[MODEL], modules.named_parameters)
    owned, local = {}, {}
    for name, parameter in parameters.items():
        unit, flat = f"{MODEL}/{name}", flats.get(id(parameter))
        if parameter.grad is None:
            continue
        if part_of(name, parameter, flat).ranks is None:
            local[name] = parameter.grad
        else:
            tree = collector.shared(unit, f"{GRADIENTS}/{name}", parameter.grad, flat)
            if ownership.owns(unit):
                owned[name] = tree
    if owned:
        collector.captured.trees[GRADIENTS] = mapping(owned)
    collector.add_local(GRADIENTS, local)


def _unit(path: str, tensor: torch.Tensor, flat: Flat | None, trusted: bool, buffer: bool) -> Unit | None:
    """What this rank holds of a tensor; None if nothing."""
    part = part_of(path, tensor, flat)
    if not part.pieces:
        return None
    return Unit(
        dtype=dtype_name(path, tensor),
        shape=part.shape,
        boxes=part.boxes,
        distributed=part.ranks is not None,
        bytes=prod(part.shape) * tensor.element_size(),
        sample="" if trusted or part.ranks is not None else _sample(part),
        buffer=buffer,
    )


def _sample(part: Part) -> str:
    values = part.pieces[0].tensor.reshape(-1)[:_SAMPLE].cpu().contiguous()
    return xxhash.xxh3_64_hexdigest(tensor_bytes(values))


def _frame() -> Unit:
    return Unit("", (), (), False, 0)


def _frame_name(item: str, found: Sequence[Optimizer], names: Mapping[int, str]) -> str:
    """The unit of what an optimizer keeps beside its state. Ranks with other parameters have another one."""
    held = [list(optimizers.parameters_by_name(optimizer, names)) for optimizer in found]
    return f"{item}#{xxhash.xxh3_64_hexdigest(repr(held).encode())}"


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.numel() and type(tensor) is torch.Tensor else 0


def _storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {_storage(tensor) for tensor in tensors} - {0}


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
