"""The order of a data set's samples in one epoch, entered at any position without loading what comes before it.

Ranks divide the order of an epoch as DistributedSampler does. Samples that no rank has taken keep their
order, and another number of ranks can divide them again.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain, islice
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import xxhash
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from ckpt.capture.rng import derive_rng_state, host_rng_state, load_rng_state
from ckpt.capture.tensors import small_leaf
from ckpt.capture.train_state import Stateful
from ckptstore.format.trees import unsupported

Order = np.ndarray[Any, np.dtype[np.int64]]
"""Indices into the data set."""
Split = Sequence[int]
"""The number of samples that each rank has taken of a split, by rank."""


@dataclass(frozen=True)
class Start:
    """How an epoch begins: with it, the same order comes again."""

    key: int
    """Seed of the random numbers that worker processes draw for this epoch's samples."""
    seed: int | None = None
    """Seed of a RandomSampler without a generator."""
    rng: dict[str, Any] | None = None
    """State of the global generators, if the sampler draws from them."""
    generators: Sequence[torch.Tensor] = ()
    """States of the generators that the loader and its samplers were given."""
    splits: Sequence[Split] = ()
    """The samples of this epoch that other numbers of ranks took before (Split)."""
    taken: int = 0
    """The samples of this epoch that came in batches of another size; without a DistributedSampler."""
    samplers: Mapping[str, Any] = field(default_factory=dict)
    """The values that samplers had changed before it (SamplerState)."""


class Numbered(NamedTuple):
    """An item from the sampler for a worker process: indices, and the seed of the random numbers drawn to load them."""

    seed: int
    indices: Any


class SeededDataset:
    """Seeds a worker's generators for each batch, so that a batch has the same random numbers in any worker.

    Stands in for a data set in worker processes. Everything else is that of the data set.
    """

    def __init__(self, dataset: Any) -> None:
        self.__dict__["_dataset"] = dataset

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)  # a worker_init_fn opens files so

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["_dataset"], name)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[_seeded(index)]

    def __getitems__(self, index: Any) -> Any:
        indices = _seeded(index)
        if getattr(self._dataset, "__getitems__", None):
            return self._dataset.__getitems__(indices)
        return [self._dataset[i] for i in indices]


def _seeded(index: Any) -> Any:
    """The indices of an item, after the seed was set that comes with it."""
    if not isinstance(index, Numbered):
        return index
    derive_rng_state(index.seed)
    return index.indices


class EpochOrder:
    """Stands in for the batch sampler of a loader, or for its sampler if it does not batch. For one thread.

    An iteration of it, the walk, begins where `enter` set it.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        batches = loader.batch_sampler
        self.sampler: Any = loader.sampler if batches is None else getattr(batches, "sampler", None)
        self.batch_size: int | None = getattr(batches, "batch_size", None)
        self._drop_last = bool(getattr(batches, "drop_last", False))
        kind = type(batches)
        self.counts_samples = (
            batches is None
            or kind is BatchSampler
            or (kind.__name__ == "BatchSampler" and kind.__module__.startswith("torchdata."))
        )
        """Whether positions count samples: batches are made of the sampler's indices in order, by torch's class or
        torchdata's."""
        self._indices: Iterable[Any] = loader.sampler if batches is None else batches
        self._numbered = loader.num_workers > 0
        wrapped = getattr(batches, "batch_sampler", None)  # that of another batch sampler, as of Accelerate's
        self.generators = _generators(
            loader.generator, self.sampler, batches, wrapped, getattr(wrapped, "sampler", None)
        )
        root = self.sampler if self.counts_samples else batches
        self.samplers = SamplerState("sampler" if self.counts_samples else "batch_sampler", root, loader.dataset)
        self._shuffling: torch.Generator | None = None
        self._source: Any = self.sampler
        if self.counts_samples and type(self.sampler) is RandomSampler and self.sampler.generator is None:
            # RandomSampler seeds a generator of its own from the global one. Here the seed is known.
            self._source = shuffled = copy.copy(self.sampler)
            shuffled.generator = self._shuffling = torch.Generator()
            self._indices = self._batched(shuffled)
        drawless = type(self.sampler) is SequentialSampler or isinstance(self.sampler, DistributedSampler)
        drawless |= self._shuffling is not None or getattr(self.sampler, "generator", None) is not None
        self._draws = not (self.counts_samples and drawless)
        self.num_shared = 0
        """The number of samples of this rank in the current epoch; with a DistributedSampler."""
        self.enter(0, None, 0, {})
        self.begun: Mapping[str, str] = {}
        """Digests of what the samplers held when the epoch had begun."""

    @property
    def distributed(self) -> DistributedSampler[Any] | None:
        """The sampler, if another number of ranks can divide its order again."""
        return self.sampler if self.counts_samples and isinstance(self.sampler, DistributedSampler) else None

    def enter(self, epoch: int, start: Start | None, num_batches: int, later: Mapping[str, Any]) -> None:
        """Let the next walk begin after this number of batches of the epoch that began so; None: of a new epoch.

        later: what samplers hold at the position, unless going there changes it: training has set it meanwhile.
        """
        self._epoch, self._start, self._skipped, self._later = epoch, start, num_batches, later
        self._reach = cache(self._begin)

    def reach(self) -> Start:
        """Bring the walk to its position: from then on it draws from no global generator. Returns how it began."""
        return self._reach()[0]

    def __iter__(self) -> Iterator[Any]:
        """Draws nothing before the first index is asked for, as torch's samplers do."""
        reach = self._reach

        def walk() -> Iterator[Any]:
            start, indices = reach()
            for number, index in enumerate(indices, self._skipped + 1):
                if self._numbered:
                    index = Numbered(xxhash.xxh3_64_intdigest(f"{start.key} {number}".encode()), index)
                yield index

        return walk()

    def __len__(self) -> int:
        return len(self._indices)  # type: ignore[arg-type]

    def _begin(self) -> tuple[Start, Iterator[Any]]:
        """How the epoch begins, and what the walk goes through."""
        start = self._start
        if start is None:
            states = [generator.get_state() for generator in self.generators]
            # Drawn from no generator: with or without this file, training draws the same numbers.
            known = torch.cat([torch.get_rng_state(), *states]).numpy().tobytes()
            start = Start(
                key=xxhash.xxh3_64_intdigest(known, seed=self._epoch),
                generators=states,
                samplers=self.samplers.keep(),
                seed=None if self._shuffling is None else int(torch.empty((), dtype=torch.int64).random_().item()),
                rng=host_rng_state() if self._draws else None,
            )
        else:
            for generator, state in zip(self.generators, start.generators, strict=False):
                generator.set_state(state)
            self.samplers.put_back(start.samplers)
            if start.rng is not None:
                load_rng_state(start.rng)
        if self._shuffling is not None and start.seed is not None:
            self._shuffling.manual_seed(start.seed)
        return start, self._walked(iter(self._rest(start)))

    def _rest(self, start: Start) -> Iterable[Any]:
        """The epoch, without what was taken in another split or batch size."""
        if start.splits:
            rest = untaken(global_order(self.sampler), start.splits)
            share = split(rest, self.sampler.rank, self.sampler.num_replicas, self.sampler.drop_last)
            self.num_shared = len(share)
            return self._batched(share)
        if self.distributed is not None:
            self.num_shared = len(self.distributed)
        return self._batched(islice(self._source, start.taken, None)) if start.taken else self._indices

    def _walked(self, indices: Iterator[Any]) -> Iterator[Any]:
        """The indices from the position on; samplers then hold what they held there."""
        ahead = list(islice(indices, 1))
        self.begun = self.samplers.digests()
        if self._skipped:
            ahead = list(islice(indices, self._skipped - 1, self._skipped))
            now = self.samplers.digests()
            later = {path: state for path, state in self._later.items() if now.get(path) == self.begun.get(path)}
            self.samplers.put_back(later)
        return chain(ahead, indices)

    def _batched(self, sampler: Iterable[int]) -> Iterable[Any]:
        return sampler if self.batch_size is None else BatchSampler(sampler, self.batch_size, self._drop_last)


class _Held(NamedTuple):
    """A value in a sampler: the item or attribute `name` of `owner`."""

    owner: Any
    name: Any
    state: Any
    """The value, or the state of an object that takes it back by `load`."""
    digest: str
    load: Callable[[Any], object] | None


class SamplerState:
    """The values that a sampler can change: generators, plain attributes, what has `state_dict`; also in samplers and
    parts that it holds. Kept before an epoch, and put back before it is iterated again.

    Plain attributes that are as they were when the loader was made are its arguments, and belong to the script.
    """

    def __init__(self, name: str, sampler: Any, dataset: Any) -> None:
        self._roots, self._dataset = {name: sampler}, dataset
        self._root = sampler
        self._made: dict[str, str] | None = None
        found = self._all()
        self._made = {path: one.digest for path, one in found.items() if one.load is None}
        self.arguments = {
            path: one.digest
            for path, one in found.items()
            if one.load is None and one.name != "epoch" and not isinstance(one.state, str | set | Iterator)
        }
        """Digests, by path; without texts, such as folders."""

    def digests(self) -> dict[str, str]:
        """Digests of everything, by path."""
        return {path: one.digest for path, one in self._all().items()}

    def keep(self, since: Mapping[str, str] | None = None) -> dict[str, Any]:
        """The values that have changed since these digests; None: all generators, and since the loader was made."""
        since = (self._made or {}) if since is None else since
        return copy.deepcopy({path: one.state for path, one in self._all().items() if since.get(path) != one.digest})

    def check(self) -> None:
        """Raise UnsupportedObject for what was there when the loader was made, and cannot be kept."""
        for path, one in self._all().items():
            if one.digest == _NOT_KEPT:
                raise unsupported(path, one.state)

    def put_back(self, kept: Mapping[str, Any]) -> None:
        """Set what was kept."""
        if not kept.keys() <= self._all().keys():
            next(iter(self._root), None)  # makes what a sampler makes when it begins
        found = self._all()
        for path, state in copy.deepcopy(dict(kept)).items():
            if path not in found:
                continue
            owner, name, live, _, load = found[path]
            if load is not None:
                load(state)
            elif type(live) is list or (isinstance(live, _ARRAYS) and live.ndim and live.shape == state.shape):
                live[:] = state  # others may hold it
            elif isinstance(owner, dict | list):
                owner[name] = state
            else:
                setattr(owner, name, state)

    def _all(self) -> dict[str, _Held]:
        found: dict[str, _Held] = {}
        for name in self._roots:
            self._look(name, self._roots, name, found, set())
        return found

    def _look(self, path: str, owner: Any, name: Any, found: dict[str, _Held], seen: set[int]) -> None:
        value = owner[name] if isinstance(owner, dict | list | tuple) else getattr(owner, name)
        if value is self._dataset or id(value) in seen or isinstance(value, _OTHERS):
            return
        part = isinstance(value, Sampler) or type(value).__module__ == type(self._root).__module__
        get, load = _access(value, part)
        state = value if get is None else get()
        digest = _digest(state)
        if digest is None or load is not None:
            seen.add(id(value))
            inner = (
                range(len(value)) if isinstance(value, list | tuple) else getattr(value, "__dict__", ()) if part else ()
            )
            for key in list(value if isinstance(value, dict) else inner):
                self._look(f"{path}.{key}", value, key, found, seen)
        if digest is None and isinstance(value, Iterator | random.SystemRandom):
            digest = _NOT_KEPT if self._made is None or path in self._made else None
        if digest is not None or load is not None:
            # The plain value that is there before an object is made has another path.
            found[path + "()" * (load is not None)] = _Held(owner, name, state, digest or "", load)


_OTHERS = (Dataset, nn.Module, Optimizer, DataLoader, type)
_ARRAYS = (np.ndarray, torch.Tensor)
_NOT_KEPT = "not kept"


def _access(value: Any, part: bool) -> tuple[Callable[[], Any], Callable[[Any], object]] | tuple[None, None]:
    """How an object says its state and takes it back. part: `state_dict` counts."""
    bits = value.bit_generator if isinstance(value, np.random.Generator) else value
    if isinstance(bits, np.random.BitGenerator):
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    if isinstance(value, torch.Generator | np.random.RandomState):
        return value.get_state, value.set_state
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate, value.setstate
    return (value.state_dict, value.load_state_dict) if part and isinstance(value, Stateful) else (None, None)


def _digest(state: Any) -> str | None:
    """The digest of plain data; None for other objects."""
    try:
        data = msgspec.msgpack.encode(state, enc_hook=partial(small_leaf, ""))
    except OverflowError:  # an integer of more than 64 bits
        data = repr(state).encode()
    except (TypeError, ValueError, RecursionError):
        return None
    return xxhash.xxh3_64_hexdigest(data)


def _generators(*owners: Any) -> list[torch.Generator]:
    """The generators that these were given, each once."""
    found = [one if isinstance(one, torch.Generator) else getattr(one, "generator", None) for one in owners]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def global_order(sampler: DistributedSampler[Any]) -> Order:
    """The order of the sampler's epoch before it is split: every sample of the data set once."""
    whole = copy.copy(sampler)
    whole.num_replicas, whole.rank, whole.drop_last = 1, 0, False
    whole.num_samples = whole.total_size = len(sampler.dataset)  # type: ignore[arg-type]
    return np.fromiter(iter(whole), np.int64, count=whole.total_size)


def untaken(order: Order, splits: Sequence[Split]) -> Order:
    """The samples of the order that no rank has taken, in order."""
    for taken in splits:
        position, rank = np.divmod(np.arange(len(order)), len(taken))
        order = order[position >= np.asarray(taken, np.int64)[rank]]
    return order


def split(order: Order, rank: int, num_ranks: int, drop_last: bool) -> list[int]:
    """The samples of a rank: r, r + n, r + 2n, ... of the order. All ranks get equal numbers of them: the tail is
    dropped, or filled up with samples from the start of the order.
    """
    total = len(order) // num_ranks * num_ranks if drop_last else -(-len(order) // num_ranks) * num_ranks
    found: list[int] = np.resize(order, total)[rank::num_ranks].tolist()  # resize repeats from the start
    return found
