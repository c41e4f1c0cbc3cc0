"""Loops over steps and epochs: left at any step and begun again, they train the other steps, with the same losses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, DistributedSampler

import ckpt
from ckpt.data import ResumableLoader
from ckptstore.errors import InvalidRequest
from tests.ckpt.data.trained import Run, Samples
from tests.support.training import same_state

NUM_STEPS, NUM_EPOCHS = 11, 3  # an epoch has 6 steps


def make() -> DataLoader[Any]:
    return DataLoader(Samples(), batch_size=4, shuffle=True)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    ckpt.close()


def begin(store: Path, seed: int = 0) -> Run:
    """A run in a process of its own, as far as the store knows."""
    ckpt.init(str(store), run="r", writer="thread")
    return Run(make, seed)


def train_steps(run: Run, stop_at: int | None = None, **options: Any) -> list[float]:
    batches, losses = run.loader.endless(), []
    for step in ckpt.steps(run.model, run.optim, NUM_STEPS, **run.extras, **options):
        losses.append(run.step(next(batches)))
        if step == stop_at:
            break
    return losses


def train_epochs(run: Run, stop_at: int | None = None, **options: Any) -> list[float]:
    losses: list[float] = []
    loop = ckpt.epochs(run.model, run.optim, NUM_EPOCHS, **run.extras, **options)
    for epoch in loop:
        assert run.loader.epoch == epoch
        for batch in run.loader:
            losses.append(run.step(batch))
            if loop.step == stop_at:
                return losses
    return losses


def steps_of(store: Path) -> list[int]:
    ckpt.close()
    with ckpt.Checkpointer(str(store), run="r", writer="thread") as found:
        return sorted(one.step for one in found._source.checkpoints("r"))


@pytest.mark.parametrize("stop_at", [0, 4, 7])
def test_steps_go_on_with_the_same_losses(store: Path, stop_at: int) -> None:
    whole = train_steps(begin(store / "whole"))
    assert train_steps(begin(store), stop_at, schedule=3) == whole[: stop_at + 1]
    saved = (stop_at - 1) // 3 * 3 if stop_at else None  # the step at which the loop is left is not saved
    rest = train_steps(begin(store, seed=1) if saved is not None else begin(store), schedule=3)
    assert (rest, steps_of(store)[-1]) == (whole[0 if saved is None else saved + 1 :], NUM_STEPS - 1)


@pytest.mark.parametrize("stop_at", [4, 6, 7, 13])
def test_epochs_go_on_within_an_epoch_and_at_its_end(store: Path, stop_at: int) -> None:
    """Before step 7 the newest save is that of the last batch of the first epoch."""
    whole = train_epochs(begin(store / "whole"))
    assert len(whole) == 6 * NUM_EPOCHS
    assert train_epochs(begin(store), stop_at, schedule=3) == whole[:stop_at]
    saved = (stop_at - 1) // 3 * 3
    assert train_epochs(begin(store, seed=1), schedule=3) == whole[saved:]
    assert steps_of(store) == list(range(3, 19, 3))


@pytest.mark.parametrize("train", [train_steps, train_epochs])
def test_a_run_that_was_trained_to_the_end_trains_nothing(store: Path, train: Any) -> None:
    first = begin(store)
    assert train(first, schedule=1000)
    again = begin(store, seed=1)
    assert train(again, schedule=1000) == []
    assert same_state(first.model.state_dict(), again.model.state_dict())
    assert steps_of(store)[-1] == (NUM_STEPS - 1 if train is train_steps else 6 * NUM_EPOCHS)


@dataclass
class Progress:
    best: float
    seen: dict[str, list[int]]


@pytest.mark.parametrize("loop", [ckpt.steps, ckpt.epochs])
def test_plain_values_go_on_as_well(store: Path, loop: Any) -> None:
    def values() -> dict[str, Any]:
        return {"own": {"best": 9.0, "at": [1, {"a": 0}]}, "shared": {"all": Progress(9.0, {"x": []})}}

    run, given = begin(store), values()
    inner = given["own"]["at"]
    for _ in loop(run.model, run.optim, 1, loader=run.loader, schedule=100, **given):
        given["own"]["best"], inner[0] = 3.0, 7
        inner.append("last")
        given["shared"]["all"].best = 4.0
        given["shared"]["all"].seen["x"].append(5)
        for batch in run.loader if loop is ckpt.epochs else ():
            run.step(batch)
    run, again = begin(store, seed=1), values()
    inner, seen = again["own"]["at"], again["shared"]["all"].seen
    left = loop(run.model, run.optim, 2, loader=run.loader, schedule=100, **again)
    assert again == given
    assert again["own"]["at"] is inner
    assert again["shared"]["all"].seen is seen
    assert left.restored is not None


def test_the_default_schedule_is_that_of_every(store: Path) -> None:
    whole = train_steps(begin(store / "whole"))
    assert train_steps(begin(store)) == whole
    assert NUM_STEPS - 1 in steps_of(store)


@pytest.mark.parametrize("train", [train_steps, train_epochs])
def test_a_preemption_ends_the_loop_with_a_last_save(store: Path, train: Any) -> None:
    run = begin(store)
    ckpt.on_preemption(grace_s=600, ask=lambda: 600.0, signals=())
    schedule = ckpt.every(seconds=1e6)
    losses = train(run, schedule=schedule)
    assert schedule.stop
    assert schedule.exit_code == 75
    assert 0 < len(losses) < NUM_STEPS
    rest = train(begin(store, seed=1), schedule=1000)
    assert losses + rest == train(begin(store / "whole"), schedule=1000)


def test_the_sampler_may_be_given_the_epoch_as_without_this_project(store: Path) -> None:
    """A script for DistributedSampler does so at the beginning of each epoch."""

    def split() -> DataLoader[Any]:
        sampler: Any = DistributedSampler(Samples(), num_replicas=2, rank=1)
        return DataLoader(Samples(), batch_size=4, sampler=sampler)

    def train(folder: Path, stop_at: int = -1) -> list[list[int]]:
        ckpt.init(str(folder), run="r", writer="thread")
        run = Run(split)
        loop = ckpt.epochs(run.model, run.optim, NUM_EPOCHS, **run.extras, schedule=2)
        for epoch in loop:
            run.loader.sampler.set_epoch(epoch)
            for batch in run.loader:
                run.step(batch)
                if loop.step == stop_at:
                    return run.seen
        return run.seen

    whole = train(store / "whole")
    assert (train(store, 6)[:4] + train(store), len(whole), steps_of(store)[-1]) == (whole, 9, 9)


def test_a_loop_needs_a_schedule_that_saves(store: Path) -> None:
    run = begin(store)
    with pytest.raises(InvalidRequest, match="after every 0 steps"):
        ckpt.steps(run.model, run.optim, 3, schedule=0)


def test_batches_are_counted_only_within_the_loop(store: Path) -> None:
    """A validation over the same loader after it has no part in it."""
    run = begin(store)
    loop = ckpt.epochs(run.model, run.optim, 1, **run.extras, schedule=1000)
    for _ in loop:
        for batch in run.loader:
            run.step(batch)
    assert isinstance(run.loader, ResumableLoader)
    assert loop.step == len(list(run.loader)) == 6
