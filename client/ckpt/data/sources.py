"""Sources: where the batches of a resumable loader come from, for each kind of data set."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ckpt.capture.rng import host_rng_state, load_rng_state
from ckpt.capture.train_state import Stateful
from ckpt.data.order import EpochOrder, SeededDataset, Start
from ckptstore.errors import StateMismatch

_KNOBS = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
    "prefetch_factor", "persistent_workers", "in_order",
)  # fmt: skip


@dataclass(frozen=True)
class Position:
    """The contents of `state_dict`."""

    kind: str
    """The kind of loader that it is a position in."""
    epoch: int
    """Number of the epoch that the next iteration is in."""
    batches: int | None = None
    """The number of its batches that training got; None between epochs."""
    set_epoch: int | None = None
    """The last argument of the sampler's or data set's `set_epoch`, if it has one."""
    start: Start | None = None
    generators: Sequence[torch.Tensor] = ()
    """States of the loader's generators between epochs."""
    workers: bool = False
    """Whether persistent workers ran, between epochs."""
    inner: Any = None
    """The state of a StatefulDataLoader over an iterable data set."""
    samplers: Mapping[str, Any] = field(default_factory=dict)
    """The values that samplers have changed in the epoch; between epochs, before it (SamplerState)."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The arguments that must be as at the save, within an epoch."""
    num_samples: int | None = None
    replica: int = 0
    num_replicas: int = 1
    batch_size: int | None = None
    taken: int = 0
    """The number of samples that this rank took of its share of the epoch."""

    @property
    def resumes(self) -> bool:
        """Whether it lies within an epoch."""
        return self.batches is not None

    def state(self) -> dict[str, Any]:
        """It as plain data."""
        return {**vars(self), "start": None if self.start is None else dict(vars(self.start))}

    @staticmethod
    def of(state: Any) -> Position:
        """The inverse of `state`. Raises StateMismatch."""
        try:
            start = state["start"]
            return Position(**{**state, "start": None if start is None else Start(**start)})
        except (KeyError, TypeError) as error:
            raise StateMismatch(
                "what was saved for the loader is not the position of a ckpt.data.resumable loader",
                "Pass the kind of object that was saved, or leave it out of the restore",
            ) from error


def _iterate(loader: DataLoader[Any], position: Position) -> Iterator[Any]:
    """An iteration of a loader. Workers that ran at the save have drawn their seed: new ones draw no other."""
    if not position.workers or loader._iterator is not None:
        return iter(loader)
    given, loader.generator = loader.generator, torch.Generator()
    try:
        return iter(loader)
    finally:
        loader.generator = given


def _between_epochs(
    loader: DataLoader[Any], position: Position, generators: Sequence[torch.Generator]
) -> dict[str, Any]:
    workers = position.workers or loader._iterator is not None
    return {"generators": [generator.get_state() for generator in generators], "workers": workers}


class MapSource:
    """A loader over a data set with indices: the position is reached by the sampler alone."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.order = EpochOrder(loader)
        batched = loader.batch_sampler is not None
        sampler = self.order.sampler if self.order.sampler is not None else loader.batch_sampler
        self.kind = f"a loader with {type(sampler).__name__}"
        self.arguments = {} if self.order.distributed is not None else self.order.samplers.arguments
        """The arguments, by name, that must be as at the save to go on within an epoch."""
        if isinstance(loader, Stateful):  # StatefulDataLoader: what it does beyond a DataLoader is done here
            knobs = {name: getattr(loader, name) for name in _KNOBS if hasattr(loader, name)}
            replaced = {"batch_sampler": self.order} if batched else {"sampler": self.order, "batch_size": None}
            self._view: Any = DataLoader(loader.dataset, **replaced, **knobs)
        else:
            self._view = copy.copy(loader)
            self._view.__dict__ |= {"batch_sampler" if batched else "sampler": self.order, "_iterator": None}
        if loader.num_workers:
            self._view.__dict__["dataset"] = SeededDataset(loader.dataset)

    def begin(self, position: Position) -> tuple[Iterator[Any], Start]:
        """An iteration from this position, which is reached on return."""
        self.order.enter(position.epoch, position.start, position.batches or 0, position.samplers)
        found = _iterate(self._view, position)
        return found, self.order.reach()

    def state(self, position: Position) -> dict[str, Any]:
        """The rest of a position: fields of Position."""
        sampler, size = self.order.distributed, self.order.batch_size
        samplers = self.order.samplers
        samplers.check()
        ranks = {} if sampler is None else {"replica": sampler.rank, "num_replicas": sampler.num_replicas}
        if not position.resumes:
            states = _between_epochs(self._view, position, self.order.generators)
            return {**states, **ranks, "samplers": samplers.keep()}
        later = {"samplers": samplers.keep(self.order.begun)}
        if sampler is None:
            changed = () if position.start is None else position.start.samplers
            arguments = {name: digest for name, digest in self.arguments.items() if name not in changed}
            return {**later, "arguments": arguments, "batch_size": (size or 1) if self.order.counts_samples else None}
        taken = min((position.batches or 0) * (size or 1), self.order.num_shared)
        return {**ranks, **later, "batch_size": size, "taken": taken}

    def prepare(self, position: Position) -> Position:
        """Set what is to be as at the save before an iteration begins. Returns the position as this source counts."""
        for generator, state in zip(self.order.generators, position.generators, strict=False):
            generator.set_state(state)
        if not position.resumes:
            self.order.samplers.put_back(position.samplers)
        saved, size, start = position.batch_size, self.order.batch_size or 1, position.start
        if saved in (None, size) or start is None or self.order.distributed is not None:
            return position
        start = replace(start, taken=start.taken + (position.batches or 0) * saved)
        return replace(position, start=start, batches=0, batch_size=size)


class _IterableSource:
    """A loader over an iterable data set: the position is reached by loading what comes before it."""

    kind = "a loader of an iterable data set"

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        # Those that decide what is in a batch.
        self.arguments = {"batch_size": loader.batch_size, "num_workers": loader.num_workers or 1}

    def begin(self, position: Position) -> tuple[Iterator[Any], Start]:
        generator, start = self._loader.generator, position.start
        if start is None:
            states = [] if generator is None else [generator.get_state()]
            start = Start(key=0, rng=host_rng_state(), generators=states)
        else:
            load_rng_state(start.rng or {})
            if generator is not None:
                generator.set_state(start.generators[0])
        found = _iterate(self._loader, position)
        for _ in range(position.batches or 0):
            next(found, None)
        return found, start

    def state(self, position: Position) -> dict[str, Any]:
        generator = self._loader.generator
        if position.resumes:
            return {"arguments": self.arguments}
        return _between_epochs(self._loader, position, [generator] if generator else [])

    def prepare(self, position: Position) -> Position:
        if self._loader.generator is not None and position.generators:
            self._loader.generator.set_state(position.generators[0])
        return position


class _StatefulSource(_IterableSource):
    """A StatefulDataLoader over an iterable data set, which reaches its position by itself."""

    kind = "a StatefulDataLoader of an iterable data set"

    def begin(self, position: Position) -> tuple[Iterator[Any], Start]:
        return iter(self._loader), Start(key=0)

    def state(self, position: Position) -> dict[str, Any]:
        return {"inner": self._loader.state_dict(), "arguments": self.arguments if position.resumes else {}}

    def prepare(self, position: Position) -> Position:
        self._loader.load_state_dict(position.inner)
        return position


Source = MapSource | _IterableSource
"""Where a loader's batches come from. MapSource explains the methods."""


def source_of(loader: DataLoader[Any]) -> Source:
    """The source for the loader's kind of data set."""
    if not isinstance(loader.dataset, IterableDataset):
        return MapSource(loader)
    return _StatefulSource(loader) if isinstance(loader, Stateful) else _IterableSource(loader)
