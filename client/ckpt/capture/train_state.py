"""The state of a training loop: the objects that are saved or restored, by the names their state is kept under."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ckpt.lazily import is_tensor, torch, torch_loaded
from ckptstore.errors import InvalidRequest
from ckptstore.reading.assets import ASSETS

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from ckpt.capture.optimizers import NamedOptimizer
    from ckpt.capture.parameters import Leaf, Parameters
    from ckpt.config import Assets

    Model = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]
    Optimizers = Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer]

MODEL = "model"
OPTIMIZER = "optim"
GRADIENTS = "grads"
RNG = "rng"
RESERVED = (MODEL, OPTIMIZER, GRADIENTS, RNG)
_MISTAKEN = frozenset(("tags", "tag", "metric", "name", "run", "step", "strict", "map_location", "pin"))
"""Names that callers expect to be options. An extra of this name has to be an object."""


@runtime_checkable
class Stateful(Protocol):
    """Anything that can say and take back its state: schedulers, scalers, data loaders, your own."""

    def state_dict(self) -> Any:
        """The state, as plain data, tensors and arrays."""

    def load_state_dict(self, state: Any) -> Any:
        """Take a state back."""


@runtime_checkable
class Resumable(Protocol):
    """A data loader that reaches its position when training asks for the first batch, and draws random numbers then."""

    def check_state_dicts(self, states: Sequence[Any]) -> None:
        """Raise StateMismatch if these states of ranks cannot be taken back. Changes nothing."""

    def restore_rng_at_position(self, restore_rng: Callable[..., None]) -> None:
        """Call `restore_rng` before the first batch is loaded; what reaching the position draws must not count."""


@dataclass(frozen=True)
class TrainState:
    """The objects of a training loop that are saved or restored together. Made for one call of save or restore."""

    modules: Mapping[str, tuple[nn.Module, ...]]
    """By item name, the model first; several chunks of one rank's pipeline stages are one item."""
    optimizers: Mapping[str, tuple[Optimizer, ...]]
    """By item name: optim, or optim.<key>."""
    others: Mapping[str, Any]
    """Extras that are not modules: kept per rank."""
    shared: Mapping[str, Any] = field(default_factory=dict)
    """Extras that all ranks hold alike: kept once, their tensors as entries."""
    assets: Assets | None = None
    """Files that are saved beside these objects."""
    placed: frozenset[str] = frozenset()
    """Modules that an earlier stage of a restore has filled; they only name parameters."""

    @staticmethod
    def of(
        model: Model | None,
        optim: Optimizers | None,
        extras: Mapping[str, Any],
        shared: Mapping[str, Any] | None = None,
        assets: Assets | None = None,
    ) -> TrainState:
        """Raises InvalidRequest for objects of the wrong kind or reserved names."""
        shared = dict(shared or {})
        for name in (*extras, *shared):
            if name in _MISTAKEN and not isinstance(extras.get(name), Stateful):
                raise InvalidRequest(
                    f"there is no option {name!r}", "See metrics= of save, checkpoint= of restore, ckptctl tag"
                )
            if name in RESERVED or name.startswith(f"{OPTIMIZER}.") or (name in extras and name in shared):
                raise InvalidRequest(f"the name {name!r} is reserved or given twice", "Use another one")
            if not name or "/" in name:
                raise InvalidRequest(f"the name {name!r} is empty or contains a slash", "Use another one")
        found = {} if model is None else {MODEL: _chunks(model)}
        found |= {name: (value,) for name, value in extras.items() if _is_module(value)}
        others = {name: value for name, value in extras.items() if not _is_module(value)}
        if assets is not None and ASSETS in shared:
            raise InvalidRequest(f"shared= has an item {ASSETS!r}, and assets= is given, too", "Give it another name")
        return TrainState(found, _named_optimizers(optim), others, shared, assets)

    def to_restore(self) -> TrainState:
        """The same for a restore: the checkpoint knows what is shared."""
        return replace(self, others={**self.others, **self.shared}, shared={})

    def others_among(self, items: Iterable[str]) -> Mapping[str, Any]:
        """The extras to restore from these items; without objects to restore into, values of all items."""
        if self.modules or self.optimizers or self.others:
            return self.others
        return dict.fromkeys(item for item in items if item != RNG)

    def without_others(self) -> TrainState:
        """Modules and optimizers only: reading them changes nothing, and runs no user code."""
        return replace(self, others={}, shared={})

    def reshard(self) -> None:
        """Put every parameter into the form in which optimizers hold it. Local; leaves are then looked for again."""
        if self.modules:
            from ckpt.capture import modules

            modules.reshard(chain(*self.modules.values()))
        for known in ("parameters", "named_optimizers"):
            self.__dict__.pop(known, None)

    @cached_property
    def parameters(self) -> Parameters:
        """The live parameters; valid until `reshard` replaces those that fully_shard had gathered."""
        from ckpt.capture import modules
        from ckpt.capture.parameters import Parameters

        known = Parameters()
        for item, chunks in self.modules.items():
            for chunk in chunks:
                modules.add_flat_parameters(chunk, known)
            named = _joined(item, (pair for chunk in chunks for pair in modules.named_parameters(chunk, known)))
            known.by_name[item] = {
                name: known.leaf(item, self.prefix(item) + name, one, f"{item}/{name}") for name, one in named.items()
            }
            for leaf in known.by_name[item].values():
                known.leaves.setdefault(id(leaf.value), leaf)
        return known

    @cached_property
    def named_optimizers(self) -> Mapping[str, Sequence[NamedOptimizer]]:
        """The optimizers by item, with the leaves of their parameters."""
        if not self.optimizers:
            return {}
        from ckpt.capture.optimizers import NamedOptimizer

        known = self.parameters
        return {item: [NamedOptimizer(item, one, known) for one in found] for item, found in self.optimizers.items()}

    def leaves(self, item: str) -> list[Leaf]:
        """The values of a module item, each once; their `state_dict` is called once.

        Raises InvalidRequest if two chunks use one name for different things.
        """
        known = self.parameters
        if item not in known.values:
            from ckpt.capture import modules

            named = chain(*self.named_optimizers.values())
            stepped = {id(leaf.value) for one in named for leaf in one.leaves.values()}
            every = [leaf for one in self.modules[item] for leaf in modules.module_leaves(item, one, known, stepped)]
            _joined(item, ((leaf.name, leaf.value) for leaf in every))
            known.values[item] = list({leaf.name: leaf for leaf in every}.values())
        return known.values[item]

    def prefix(self, item: str) -> str:
        """Prefix of a module item's parameter names in optimizer state; the model's names have none."""
        return "" if item == MODEL else f"{item}."

    def all_names(self) -> Iterator[tuple[str, int]]:
        """Every name of every parameter, also of tied ones, and its id."""
        from ckpt.capture import modules

        for item, chunks in self.modules.items():
            for chunk in chunks:
                for name, parameter in modules.named_parameters(chunk, self.parameters, remove_duplicate=False):
                    yield self.prefix(item) + name, id(parameter)

    def gradients(self) -> dict[str, Leaf]:
        """The model's parameters that have a gradient, by name. Raises UnsupportedObject."""
        if MODEL not in self.modules:
            return {}
        from ckpt.capture import modules

        modules.check_reduced(self.modules[MODEL])
        parameters = self.parameters.by_name[MODEL]
        return {name: leaf for name, leaf in parameters.items() if leaf.value.grad is not None}


def _joined(item: str, named: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The contents of an item's chunks, by name. Raises InvalidRequest if two use one name for different things."""
    joined: dict[str, Any] = {}
    for name, value in named:
        if not _same(joined.setdefault(name, value), value):
            raise InvalidRequest(
                f"two chunks of {item!r} hold different tensors under the name {name!r}",
                "Keep the names that parameters have in the whole model; pass several models as {'G': G, 'D': D}",
            )
    return joined


def _is_module(value: object) -> bool:
    return torch_loaded() and isinstance(value, torch.nn.Module)


def _same(known: Any, value: Any) -> bool:
    if known is value or not (is_tensor(known) and is_tensor(value)):
        return known is value
    from ckpt.capture.parts import memory_address

    address = memory_address(known)
    return address != 0 and address == memory_address(value) and known.shape == value.shape


def _chunks(model: Model) -> tuple[nn.Module, ...]:
    """Several models by name are one, as `torch.nn.ModuleDict` names their parameters."""
    chunks: Any = (model,)
    if not _is_module(model) and isinstance(model, Iterable):
        chunks = tuple(model.values() if isinstance(model, Mapping) else model)
    for chunk in chunks:
        if not _is_module(chunk):
            kind = "state_dict" if isinstance(model, Mapping) and is_tensor(chunk) else type(chunk).__name__
            raise InvalidRequest(
                f"model is a {kind}",
                "Pass a torch.nn.Module, several, or {'G': G, 'D': D}; arrays of numpy and JAX as shared={...}",
            )
    if not isinstance(model, Mapping):
        return tuple(chunks)
    try:
        return (torch.nn.ModuleDict(model),)
    except (KeyError, TypeError) as error:
        raise InvalidRequest(f"model has a name that is not allowed: {error}", "Use names without dots") from error


def _named_optimizers(optim: Optimizers | None) -> dict[str, tuple[Optimizer, ...]]:
    if optim is None:
        return {}
    named: dict[str, tuple[Any, ...]]
    if isinstance(optim, Mapping):
        named = {f"{OPTIMIZER}.{key}": (optimizer,) for key, optimizer in optim.items()}
    else:
        named = {OPTIMIZER: tuple(optim) if isinstance(optim, Iterable) else (optim,)}
    base: Any = torch.optim.Optimizer if torch_loaded() else ()
    for item, optimizer in ((item, one) for item, found in named.items() for one in found):
        inside = [name for name, value in getattr(optimizer, "__dict__", {}).items() if isinstance(value, base)]
        # A wrapper (LARC, Lookahead) has a `state_dict` that lacks the optimizer inside it.
        if not isinstance(optimizer, base) or (inside and type(optimizer).state_dict is base.state_dict):
            wrapped = f"Pass its .{inside[0]}; state of its own as an extra" if inside else ""
            raise InvalidRequest(
                f"{item} is a {type(optimizer).__name__}",
                wrapped or "Pass torch.optim.Optimizer objects, not their state_dict",
            )
    return named
