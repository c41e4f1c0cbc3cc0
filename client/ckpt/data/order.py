"""The order of a data set's samples in one epoch, entered at any position without loading what comes before it.

Ranks divide the order of an epoch as DistributedSampler does. Samples that no rank has taken keep their
order, and another number of ranks can divide them again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from ckpt.capture.rng import derive_rng_state, host_rng_state, load_rng_state

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
        if not isinstance(index, Numbered):
            return self._dataset[index]
        derive_rng_state(index.seed)
        return self._dataset[index.indices]

    def __getitems__(self, index: Any) -> Any:
        indices = index
        if isinstance(index, Numbered):
            derive_rng_state(index.seed)
            indices = index.indices
        if getattr(self._dataset, "__getitems__", None):
            return self._dataset.__getitems__(indices)
        return [self._dataset[i] for i in indices]


class EpochOrder:
    """Stands in for the batch sampler of a loader, or for its sampler if it does not batch. For one thread.

    An iteration of it, the walk, begins where `enter` set it.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        batches = loader.batch_sampler
        self.sampler: Any = loader.sampler if batches is None else getattr(batches, "sampler", None)
        self.batch_size: int | None = getattr(batches, "batch_size", None)
        self._drop_last = bool(getattr(batches, "drop_last", False))
        self._rebuilt = batches is None or _is_plain(batches)
        self._indices: Iterable[Any] = loader.sampler if batches is None else batches
        self._numbered = loader.num_workers > 0
        wrapped = getattr(batches, "batch_sampler", None)  # that of another batch sampler, as of Accelerate's
        self.generators = _generators(
            loader.generator, self.sampler, batches, wrapped, getattr(wrapped, "sampler", None)
        )
        self._shuffling: torch.Generator | None = None
        if self._rebuilt and type(self.sampler) is RandomSampler and self.sampler.generator is None:
            # RandomSampler seeds a generator of its own from the global one. Here the seed is known.
            shuffled = copy.copy(self.sampler)
            shuffled.generator = self._shuffling = torch.Generator()
            self._indices = self._batched(shuffled)
        drawless = type(self.sampler) is SequentialSampler or isinstance(self.sampler, DistributedSampler)
        drawless |= self._shuffling is not None or getattr(self.sampler, "generator", None) is not None
        self._draws = not (self._rebuilt and drawless)
        self.num_shared = 0
        """The number of samples of this rank in the current epoch; with a DistributedSampler."""
        self._start: Start | None = None
        self._epoch = self._skipped = 0
        self._walk: _Walk | None = None

    @property
    def distributed(self) -> DistributedSampler[Any] | None:
        """The sampler, if another number of ranks can divide its order again."""
        return self.sampler if self._rebuilt and isinstance(self.sampler, DistributedSampler) else None

    def enter(self, epoch: int, start: Start | None, num_batches: int) -> None:
        """Let the next walk begin after this number of batches of the epoch that began so; None: of a new epoch."""
        self._epoch, self._start, self._skipped, self._walk = epoch, start, num_batches, None

    def reach(self) -> Start:
        """Bring the walk to its position: from then on it draws from no global generator. Returns how it began."""
        assert self._walk is not None
        return self._walk.begin()

    def __iter__(self) -> Iterator[Any]:
        self._walk = _Walk(self)
        return self._walk

    def __len__(self) -> int:
        return len(self._indices)  # type: ignore[arg-type]

    def begin(self) -> tuple[Start, Iterator[Any]]:
        """How the epoch begins, and what the walk goes through."""
        start = self._start
        if start is None:
            states = [generator.get_state() for generator in self.generators]
            start = Start(key=_key(self._epoch, torch.get_rng_state(), *states), generators=states)
            if self._shuffling is not None:
                seed = int(torch.empty((), dtype=torch.int64).random_().item())
                start = replace(start, seed=seed)
            elif self._draws:
                start = replace(start, rng=host_rng_state())
        else:
            for generator, state in zip(self.generators, start.generators, strict=False):
                generator.set_state(state)
            if start.rng is not None:
                load_rng_state(start.rng)
        if self._shuffling is not None and start.seed is not None:
            self._shuffling.manual_seed(start.seed)
        indices = self._indices
        if start.splits:
            share = self._share(start.splits)
            self.num_shared, indices = len(share), self._batched(share)
        elif self.distributed is not None:
            self.num_shared = len(self.distributed)
        walked = iter(indices)
        for _ in range(self._skipped):
            next(walked, None)
        return start, walked

    def numbered(self, start: Start, number: int, indices: Any) -> Any:
        """The loader's item for the batch of this number, counted from the position."""
        if not self._numbered:
            return indices
        return Numbered(xxhash.xxh3_64_intdigest(f"{start.key} {self._skipped + number}".encode()), indices)

    def _share(self, splits: Sequence[Split]) -> list[int]:
        sampler = self.distributed
        assert sampler is not None
        rest = untaken(global_order(sampler), splits)
        return split(rest, sampler.rank, sampler.num_replicas, sampler.drop_last)

    def _batched(self, sampler: Iterable[int]) -> Iterable[Any]:
        return sampler if self.batch_size is None else BatchSampler(sampler, self.batch_size, self._drop_last)


class _Walk(Iterator[Any]):
    """One iteration. Draws nothing before the first index is asked for, as torch's samplers do."""

    def __init__(self, order: EpochOrder) -> None:
        self._order = order
        self._start: Start | None = None
        self._indices: Iterator[Any] = iter(())
        self._first: list[Any] = []
        self._number = 0

    def begin(self) -> Start:
        """Go to the position, and draw what the sampler draws at its start. Again: no effect."""
        if self._start is None:
            self._start, self._indices = self._order.begin()
            self._first = list(zip(range(1), self._indices, strict=False))
        return self._start

    def __next__(self) -> Any:
        start = self.begin()
        index = self._first.pop()[1] if self._first else next(self._indices)
        self._number += 1
        return self._order.numbered(start, self._number, index)


def _generators(*owners: Any) -> list[torch.Generator]:
    """The generators that these were given, each once."""
    found = [one if isinstance(one, torch.Generator) else getattr(one, "generator", None) for one in owners]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def _is_plain(batches: object) -> bool:
    """Whether it makes batches of its sampler's indices in order: torch's class, or torchdata's."""
    kind = type(batches)
    return kind is BatchSampler or (kind.__name__ == "BatchSampler" and kind.__module__.startswith("torchdata."))


def _key(epoch: int, *states: torch.Tensor) -> int:
    # Drawn from no generator: with or without this file, training draws the same numbers.
    return xxhash.xxh3_64_intdigest(torch.cat(states).numpy().tobytes(), seed=epoch)


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
