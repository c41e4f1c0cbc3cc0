"""The resumable loader: a DataLoader that knows its position, and goes on from it in another process.

A source is where its batches come from, for each kind of data set.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset

from ckpt.capture.rng import RngOnce, host_rng_state, load_rng_state, rng_state
from ckpt.capture.train_state import Stateful
from ckpt.data.order import EpochOrder, SeededDataset, Start
from ckptstore.errors import InvalidRequest, StateMismatch

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
        return {**vars(self), "start": self.start and dict(vars(self.start))}

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


logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class _Observer(NamedTuple):
    """Called by an iteration."""

    begins: Callable[[], object] = lambda: None
    goes_on: Callable[[], bool] = lambda: True


class _Iteration(Iterator[_T]):
    """One epoch, or the rest of one."""

    def __init__(self, at: Position, batches: Iterator[_T], start: Start, observer: _Observer) -> None:
        self.epoch, self.start = at.epoch, start
        self.num_batches = at.batches or 0
        self.ended = False
        self._batches = batches
        self._observer, self._training = observer, False

    def __next__(self) -> _T:
        if self._training and not self._observer.goes_on():
            raise StopIteration  # not at its end: the position stays
        try:
            batch = next(self._batches)
        except StopIteration:
            self.ended, self._training = True, False
            raise
        self.num_batches += 1
        self._training = True
        self._observer.begins()
        return batch

    def end(self) -> None:
        """Give no more batches."""
        self._batches, self.ended = iter(()), True


class ResumableLoader(Generic[_T]):
    """A DataLoader that goes on where a checkpoint was saved. Made by `ckpt.data.resumable`; for the training thread.

    Iterate over it in place of the loader, and pass it to saves and restores by keyword. Its attributes are those of
    the loader. An iteration that is dropped before its end, as by `break`, counts as an epoch.
    """

    def __init__(self, loader: DataLoader[_T]) -> None:
        self._loader = loader
        self._source = source_of(loader)
        self._next = Position(self._source.kind, 0)
        self._iteration: weakref.ref[_Iteration[_T]] | None = None
        self._restore_rng: RngOnce | None = None
        self._observer = _Observer()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    @property
    def epoch(self) -> int:
        """Number of the current epoch, from 0; between epochs of the next one.

        for epoch in range(loader.epoch, num_epochs): ...
        """
        current = self._current()
        return self._next.epoch if current is None else current.epoch

    @property
    def num_batches(self) -> int:
        """The number of batches that training got in this epoch, those before a restore included."""
        current = self._current()
        return (self._next.batches or 0) if current is None else current.num_batches

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, and that of the sampler or data set if it has a `set_epoch`.

        Raises InvalidRequest if the restored position is in another epoch.
        """
        if self._next.resumes and epoch != self._next.epoch:
            raise self._in_another_epoch(epoch)
        self._next = replace(self._next, epoch=epoch)
        if (target := self._epoch_target()) is not None:
            target.set_epoch(epoch)

    def end_epoch(self) -> None:
        """End an iteration that is going on: the position is then the start of the next epoch.

        For loops that know the number of batches and do not ask for one more. No effect between epochs.
        """
        if (current := self._current()) is not None:
            current.end()

    def endless(self) -> Iterator[_T]:
        """The batches of all epochs, one after the other, from the position on; sets the epoch of each.

        Raises InvalidRequest if the loader has no batches.
        """
        while True:
            is_empty = not self._next.resumes
            self.set_epoch(self.epoch)
            for batch in self:
                is_empty = False
                yield batch
            if is_empty:
                raise InvalidRequest("the loader has no batches", "Give it a data set that is not empty")

    @contextmanager
    def observed(self, begins: Callable[[], None], goes_on: Callable[[], bool]) -> Iterator[None]:
        """Within this context, call `begins` with each batch that training gets, and `goes_on` when it asks for the
        next one, before that is loaded. If `goes_on` returns false, there are no more batches.
        """
        self._observer = _Observer(begins, goes_on)
        try:
            yield
        finally:
            self._observer = _Observer()

    def __iter__(self) -> Iterator[_T]:
        at, restore_rng = self._next, self._restore_rng
        live = getattr(self._epoch_target(), "epoch", None)
        if at.resumes and None not in (at.set_epoch, live) and live != at.set_epoch:
            raise self._in_another_epoch(live)
        if restore_rng is not None:  # all loaders of a restore share it
            restore_rng(at.resumes)
        before = rng_state() if at.resumes else None
        batches, start = self._source.begin(at)
        if before is not None:
            load_rng_state(before)
        self._restore_rng = None
        self._next = Position(self._source.kind, at.epoch + 1)
        iteration = _Iteration(at, batches, start, self._observer)
        self._iteration = weakref.ref(iteration)
        return iteration

    def state_dict(self) -> dict[str, Any]:
        """The position: the batches that training got so far, and how their order comes again."""
        current, at = self._current(), self._next
        if current is None and at.resumes:  # restored, and not begun
            return at.state()
        if current is not None:
            at = Position(self._source.kind, current.epoch, current.num_batches, start=current.start)
        live = getattr(self._epoch_target(), "epoch", None)
        at = replace(at, num_samples=self._num_samples(), set_epoch=live if isinstance(live, int) else None)
        return {**at.state(), **self._source.state(at)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the position of the next iteration; one that is going on ends. Raises StateMismatch."""
        self.check_state_dicts([state])
        self._take(Position.of(state))

    def check_state_dicts(self, states: Sequence[Any]) -> None:
        """Raise StateMismatch if these are not positions in such a loader. Changes nothing."""
        for position in map(Position.of, states):
            if position.kind != self._source.kind:
                raise StateMismatch(
                    f"the loader was saved as {position.kind}, and is {self._source.kind} here",
                    "Give the loader the kind of sampler that it had; DistributedSampler works on one process, too",
                )
            live = self._source.arguments
            others = [name for name, saved in position.arguments.items() if live.get(name, saved) != saved]
            if position.resumes and others:
                raise StateMismatch(
                    f"the loader was saved within an epoch, and is made otherwise here: {', '.join(others)}",
                    "Make the loader and its samplers with the arguments that they had, at least until the epoch ends",
                )

    def restore_rng_at_position(self, restore_rng: RngOnce) -> None:
        """Put this random state back when the next iteration goes to a restored position within an epoch."""
        self._restore_rng = restore_rng

    def _take(self, position: Position) -> None:
        num_samples = self._num_samples()
        if position.num_samples != num_samples:
            logger.warning(
                "the data set has %s samples and had %s at the save: the epoch goes on in another order",
                num_samples,
                position.num_samples,
            )
        self.end_epoch()
        self._iteration, self._restore_rng = None, None
        self._next = self._source.prepare(position)
        if (target := self._epoch_target()) is not None and position.set_epoch is not None:
            target.set_epoch(position.set_epoch)

    def _num_samples(self) -> int | None:
        dataset: Any = self._loader.dataset  # needs no length if a sampler is given
        return len(dataset) if isinstance(self._source, MapSource) and hasattr(dataset, "__len__") else None

    def _current(self) -> _Iteration[_T] | None:
        found = None if self._iteration is None else self._iteration()
        return None if found is None or found.ended else found

    def _epoch_target(self) -> Any:
        """The object with a `set_epoch`, if there is one."""
        batches = self._loader.batch_sampler
        owners = (self._loader.sampler, getattr(batches, "sampler", None), batches, self._loader.dataset)
        return next((one for one in owners if callable(getattr(one, "set_epoch", None))), None)

    def _in_another_epoch(self, epoch: object) -> InvalidRequest:
        return InvalidRequest(
            f"the loader was restored in epoch {self._next.epoch}, and is to begin epoch {epoch}",
            "Begin with the restored one: for epoch in range(loader.epoch, num_epochs)",
        )


class SplitLoader(ResumableLoader[_T]):
    """A resumable loader whose epochs are split among ranks by a DistributedSampler."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See ResumableLoader. With another batch size or number of ranks, the rest of the epoch is split again."""
        position, order = Position.of(state), self._order
        here = (order.sampler.num_replicas, order.batch_size)
        if not position.resumes or (position.num_replicas, position.batch_size) == here:
            super().load_state_dict(state)
        else:
            self.load_state_dicts([{**state, "replica": rank} for rank in range(position.num_replicas)])

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Split among the ranks of now what the ranks of the save left of the epoch, in the order it had.

        No sample comes twice and none is left out, except what DistributedSampler repeats or drops so that all ranks
        get equal numbers. Raises StateMismatch.
        """
        self.check_state_dicts(states)
        positions = [Position.of(state) for state in states]
        first = min(positions, key=lambda one: (one.epoch, not one.resumes))
        if first.start is None:
            self._take(first)
            return
        order = self._order
        everything = len(order.sampler) * max(1, first.num_replicas)
        taken = [0] * first.num_replicas
        for one in positions:
            taken[one.replica] = everything if one.epoch > first.epoch else one.taken
        start = replace(first.start, splits=[*first.start.splits, taken])
        rank, world, size = order.sampler.rank, order.sampler.num_replicas, order.batch_size
        # Saved again before the first batch, it is a position among the ranks of now.
        self._take(replace(first, start=start, batches=0, taken=0, replica=rank, num_replicas=world, batch_size=size))

    @property
    def _order(self) -> EpochOrder:
        assert isinstance(self._source, MapSource)
        return self._source.order


def resumable(loader: DataLoader[_T]) -> ResumableLoader[_T]:
    """The loader, able to go on where a checkpoint was saved; iterate over what this returns.

        loader = ckpt.data.resumable(DataLoader(dataset, batch_size=32, shuffle=True))
        restored = ckpt.restore(model, optim, loader=loader)
        for epoch in range(loader.epoch, num_epochs):
            loader.set_epoch(epoch)
            for batch in loader: ...
                ckpt.save_async(model, optim, step, loader=loader)

    The resumed run gets the batches that the uninterrupted one would have got, and random state as of the save from the
    first of them on. Samples before the position are not loaded, except those of an iterable data set. With worker
    processes each batch of a data set with indices has random numbers of its own. With a DistributedSampler the rest of
    an epoch can go to another number of ranks. Raises InvalidRequest.
    """
    if isinstance(loader, ResumableLoader):
        return loader
    if not isinstance(loader, DataLoader):
        raise InvalidRequest(f"a {type(loader).__name__} is not a data loader", "Pass a torch.utils.data.DataLoader")
    if not isinstance(loader.dataset, IterableDataset) and EpochOrder(loader).distributed is not None:
        return SplitLoader(loader)
    return ResumableLoader(loader)
