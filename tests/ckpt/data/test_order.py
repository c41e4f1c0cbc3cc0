"""An epoch that goes on with other numbers of ranks: every sample once."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import ckpt
from ckpt import Checkpointer
from ckpt.data.order import split, untaken
from tests.support.parallel.runner import Scenario, run_scenarios
from tests.support.training import seed_all


class Numbers(Dataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def loaders(size: int, world: int, batch_size: int, drop_last: bool) -> list[Any]:
    """A loader of each rank, in the second epoch."""
    found = []
    for rank in range(world):
        sampler: Any = DistributedSampler(Numbers(size), world, rank, seed=7, drop_last=drop_last)
        found.append(ckpt.data.resumable(DataLoader(Numbers(size), batch_size, sampler=sampler)))
        found[-1].set_epoch(1)
    return found


def states_after(ranks: list[Any], num_batches: int, seen: list[int]) -> list[Any]:
    iterations = [iter(loader) for loader in ranks]
    for _ in range(num_batches):
        for iteration in iterations:
            batch = next(iteration, None)
            seen += [] if batch is None else batch.tolist()
    return [loader.state_dict() for loader in ranks]


worlds = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=4)


@settings(max_examples=25, deadline=None)
@given(size=st.integers(1, 60), worlds=worlds, last=st.integers(1, 4), drop_last=st.booleans())
def test_every_sample_comes_once(size: int, worlds: list[tuple[int, int, int]], last: int, drop_last: bool) -> None:
    seed_all(0)
    seen: list[int] = []
    states: list[Any] = []
    for world, batch_size, num_batches in [*worlds, (last, 2, size)]:
        ranks = loaders(size, world, batch_size, drop_last)
        for loader in ranks if states else []:
            loader.load_state_dicts(states)
        states = states_after(ranks, num_batches, seen)
        last = max(last, world)
        if states[0]["batches"] is None:  # the epoch has ended
            break
    counts = Counter(seen)
    # DistributedSampler makes equal parts: it repeats samples or leaves some out, fewer than ranks.
    repeated = sum(counts.values()) - len(counts)
    if drop_last:
        assert repeated == 0
        assert size - len(counts) < last
    else:
        assert len(counts) == size
        assert repeated < last


@pytest.mark.parametrize("world", [1, 3, 4])
def test_the_order_of_the_epoch_goes_on(world: int) -> None:
    whole: list[int] = []
    states_after(loaders(24, 1, 1, False), 24, whole)
    seen: list[int] = []
    states = states_after(loaders(24, 2, 3, False), 2, seen)
    assert sorted(seen) == sorted(whole[:12])
    rest: list[int] = []
    ranks = loaders(24, world, 1, False)
    for loader in ranks:
        loader.load_state_dicts(states)
    states_after(ranks, 12 // world, rest)
    assert rest == whole[12:]


def test_ranks_at_different_positions() -> None:
    order = untaken(np.arange(10), [[3, 1]])
    assert order.tolist() == [3, 5, 6, 7, 8, 9]
    assert [split(order, rank, 4, drop_last=False) for rank in range(4)] == [[3, 8], [5, 9], [6, 3], [7, 5]]
    assert [split(order, rank, 4, drop_last=True) for rank in range(4)] == [[3], [5], [6], [7]]
    assert untaken(order, [[1, 1, 1, 1], [2]]).tolist() == []


@pytest.mark.parametrize("world", [1, 3, 4])
def test_a_split_that_was_not_begun_is_saved_again(world: int) -> None:
    seen: list[int] = []
    states = states_after(loaders(24, 2, 2, False), 1, seen)
    between = loaders(24, 4, 2, False)
    for loader in between:
        loader.load_state_dicts(states)
    ranks = loaders(24, world, 2, False)
    for rank, loader in enumerate(ranks):
        if world == 4:
            loader.load_state_dict(between[rank].state_dict())
        else:
            loader.load_state_dicts([one.state_dict() for one in between])
    states_after(ranks, 24, seen)
    assert set(seen) == set(range(24))


def test_a_rank_that_has_not_begun_the_epoch_has_taken_nothing_of_it() -> None:
    seen: list[int] = []
    first, second = loaders(24, 2, 2, False)
    states = states_after([first], 1, seen)
    (rest,) = loaders(24, 1, 2, False)
    rest.load_state_dicts([*states, second.state_dict()])
    states_after([rest], 24, seen)
    assert sorted(seen) == list(range(24))


def test_a_loader_with_a_state_of_its_own_in_real_ranks_whose_number_changes_twice(tmp_path: Path) -> None:
    (tmp_path / "scenarios").mkdir()
    stages = [(2, 4), (3, 2), (1, None)]
    scenarios = [
        Scenario(
            f"{__name__}:train", world, {"store": str(tmp_path / "store"), "step": step, "num_batches": num_batches}
        )
        for step, (world, num_batches) in enumerate(stages)
    ]
    found = [outcome.result() for outcome in run_scenarios(scenarios, tmp_path / "scenarios")]
    assert [[len(seen) for seen in ranks] for ranks in found] == [[8, 8], [4, 4, 4], [20]]
    assert sorted(sample for ranks in found for seen in ranks for sample in seen) == list(range(48))


def train(store: str, step: int, num_batches: int | None) -> list[int]:
    """Resume, take batches, save. Returns the numbers of the samples that this rank got."""
    torch.manual_seed(step)
    numbers: Any = list(range(48))
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    sampler: Any = DistributedSampler(numbers, size, rank, seed=3)
    with warnings.catch_warnings(action="ignore"):  # torchdata calls what torch has deprecated
        loader = ckpt.data.resumable(StatefulDataLoader(numbers, batch_size=2, sampler=sampler))
    model = nn.Linear(2, 2)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[int] = []
    with Checkpointer(store, run="r", writer="thread") as checkpointer:
        checkpointer.restore(model, optim, loader=loader)
        for batch in loader:
            seen += batch.tolist()
            if num_batches is not None and len(seen) == 2 * num_batches:
                checkpointer.save(model, optim, step, loader=loader)
                break
    return seen
