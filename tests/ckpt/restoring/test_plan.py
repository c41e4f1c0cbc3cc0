"""State that belongs to ranks, when a checkpoint is restored by more or fewer of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from ckpt import Checkpointer
from ckpt.restoring.plan import share_out
from ckptstore.errors import StateMismatch
from ckptstore.format.documents import JSON
from tests.support.parallel.runner import Outcome, Scenario, run_scenario, run_scenarios
from tests.support.training import seed_all
from tests.support.waiting import present


def _saved(count: int, **items: list[JSON]) -> list[dict[str, JSON]]:
    return [{item: values[rank] for item, values in items.items()} for rank in range(count)]


@pytest.mark.parametrize("world_size", [1, 3, 4, 9])
def test_ranks_that_existed_keep_their_random_numbers_and_others_derive_them(world_size: int) -> None:
    saved = _saved(4, rng=["a", "b", "c", "d"])
    states = [share_out(saved, rank, world_size, {}, strict=True) for rank in range(world_size)]
    assert [state.items for state in states[:4]] == [{"rng": value} for value in "abcd"[:world_size]]
    assert [state.seed for state in states[:4]] == [None] * min(4, world_size)
    seeds = [state.seed for state in states[4:]]
    assert None not in seeds
    assert len(set(seeds)) == len(seeds)
    assert all(state.items == {} for state in states[4:])
    assert seeds == [share_out(saved, rank, world_size, {}, strict=True).seed for rank in range(4, world_size)]


def test_one_process_that_becomes_several_gives_each_its_own_random_numbers() -> None:
    states = [share_out(_saved(1, rng=["a"]), rank, 3, {}, strict=True) for rank in range(3)]
    assert states[0].items == {"rng": "a"}
    assert states[1].seed != states[2].seed
    assert None not in (states[1].seed, states[2].seed)
    expected = (
        "saved by 1, restored by 3 ranks: rank 0 with the random numbers they had, ranks 1 to 2 with derived ones"
    )
    assert states[2].notes == (expected,)


def test_equal_values_of_all_ranks_are_restored_on_every_rank() -> None:
    saved = _saved(2, rng=["same", "same"], scheduler=["s", "s"])
    for rank in range(5):
        state = share_out(saved, rank, 5, {}, strict=True)
        assert (state.items, state.seed) == ({"rng": "same", "scheduler": "s"}, None)
        assert state.notes == ("saved by 2, restored by 5 ranks: with the random numbers that all ranks had",)


def test_state_that_fits_no_rank_is_refused_with_a_hint() -> None:
    saved = _saved(2, position=[1, 2], seen=["x", "y"], step=[7, 7])
    with pytest.raises(
        StateMismatch, match="saved by 2 ranks and is restored by 3, and position, seen differed"
    ) as caught:
        share_out(saved, 0, 3, {"position": object(), "seen": None}, strict=True)
    assert "load_state_dicts" in caught.value.hint
    assert "strict=False" in caught.value.hint


def test_state_that_is_not_to_be_restored_may_differ() -> None:
    saved = _saved(2, loader=[1, 2], step=[7, 7])
    assert share_out(saved, 0, 1, {"step": None}, strict=True).items == {"loader": 1, "step": 7}
    with pytest.raises(StateMismatch, match="grads differed"):
        share_out(_saved(2, grads=[1, 2]), 0, 1, {}, strict=True)


def test_without_strict_it_is_taken_from_the_rank_modulo_the_saved_ones() -> None:
    saved = _saved(2, position=[1, 2], step=[7, 7])
    states = [share_out(saved, rank, 3, {"position": None}, strict=False) for rank in range(3)]
    assert [state.items["position"] for state in states] == [1, 2, 1]
    assert "position: taken from rank (own rank modulo 2)" in states[0].notes


WORLDS = (1, 2, 3)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Outcome]:
    """Saved by two ranks, restored by `world_size`."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    store = str(folder / "store")
    scenarios = [Scenario(f"{__name__}:save", 2, {"store": store})]
    scenarios += [Scenario(f"{__name__}:restore", size, {"store": store}) for size in WORLDS]
    found = run_scenarios(scenarios, folder / "scenarios")
    return dict(zip((0, *WORLDS), found, strict=True))


@pytest.mark.parametrize("world_size", WORLDS)
def test_in_real_ranks(outcomes: dict[int, Outcome], world_size: int) -> None:
    drawn = [result["drawn"] for result in outcomes[0].result()]
    results = outcomes[world_size].result()
    # Python's, numpy's and torch's next numbers.
    assert [result["drawn"] for result in results][:2] == drawn[:world_size]
    assert len({str(result["drawn"]) for result in results}) == world_size
    # Samples 0 to 9 were to be seen; each rank had seen two of its own.
    assert sorted([sample for result in results for sample in result["left"]]) == [4, 5, 6, 7, 8, 9]
    changed = world_size != 2
    assert all(bool(result["notes"]) == changed for result in results)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_with_and_without_an_optimizer_restore_together(rank: int, tmp_path: Path) -> None:
    arguments = {"store": str(tmp_path / "store"), "rank": rank}
    scenario = Scenario(f"{__name__}:optimizer_on_one_rank", 2, arguments)
    assert run_scenario(scenario, tmp_path / "scenario") == [[None, 1, 1, 2]] * 2


class Samples:
    """Ten samples; rank r of n sees every n-th, from r on."""

    def __init__(self) -> None:
        rank, size = _rank(), _size()
        self.left = list(range(10))[rank::size]

    def state_dict(self) -> dict[str, Any]:
        return {"left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = state["left"]

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        self.left = sorted(sample for state in states for sample in state["left"])[_rank() :: _size()]


def save(store: str) -> dict[str, Any]:
    """After two samples of each rank; the numbers that come next."""
    seed_all(_rank())
    model, samples = nn.Linear(3, 3), Samples()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    del samples.left[:2]
    with Checkpointer(store, run="r", writer="thread") as checkpointer:
        checkpointer.save(model, None, 1, loader=samples)
    return {"drawn": _draw()}


def restore(store: str) -> dict[str, Any]:
    seed_all(99)
    samples = Samples()
    with Checkpointer(store, run="r", writer="thread") as checkpointer:
        restored = present(checkpointer.restore(nn.Linear(3, 3), loader=samples))
    return {"drawn": _draw(), "left": samples.left, "notes": restored.notes}


def optimizer_on_one_rank(store: str, rank: int) -> list[int | None]:
    """The steps that restores of an empty and of a saved run gave; only `rank` has an optimizer."""
    model = nn.Linear(3, 3)
    optim = torch.optim.SGD(model.parameters(), lr=0.1) if _rank() == rank else None
    steps: list[int | None] = []
    for step in (1, 2):
        with Checkpointer(store, run="r", writer="thread", peer_timeout_s=30) as checkpointer:
            restored = checkpointer.restore(model, optim)
            steps.append(None if restored is None else restored.step)
            checkpointer.save(model, optim, step)
            restored = checkpointer.restore(model, optim)  # after ranks have agreed
            steps.append(None if restored is None else restored.step)
    return steps


def _draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
