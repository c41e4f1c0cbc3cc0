"""A resumed run over a resumable loader gets the batches, and the losses, of the uninterrupted one."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

import ckpt
from ckpt.capture.rng import RngOnce, host_rng_state, load_rng_state
from ckpt.data import ResumableLoader
from ckptstore.errors import InvalidRequest, StateMismatch, UnsupportedObject
from tests.ckpt.data.trained import NUM_SAMPLES, MakeLoader, Run, Samples, Stream, interrupted
from tests.support.command_line import invoke
from tests.support.jobs import Job, kept, killed_and_resumed
from tests.support.training import same_state, seed_all


def own() -> torch.Generator:
    return torch.Generator().manual_seed(5)


class Backwards(Sampler[list[int]]):
    """Batches of a custom batch sampler, in an order drawn from Python's generator."""

    def __iter__(self) -> Iterator[list[int]]:
        groups = [list(range(i, min(i + 4, NUM_SAMPLES))) for i in range(0, NUM_SAMPLES, 4)]
        random.shuffle(groups)
        return iter(groups)

    def __len__(self) -> int:
        return -(-NUM_SAMPLES // 4)


def distributed(**options: Any) -> DataLoader[Any]:
    sampler: Any = DistributedSampler(Samples(), num_replicas=2, rank=1, **options)
    return DataLoader(Samples(), batch_size=3, sampler=sampler)


class Own(Sampler[int]):
    """A sampler that draws from something of its own, `rng`, and shuffles its order further in each epoch."""

    def __init__(self, rng: Any, **more: Any) -> None:
        self.rng, self.order, self.epochs = rng, list(range(NUM_SAMPLES)), 0
        vars(self).update(more)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __iter__(self) -> Iterator[int]:
        self.epochs += 1
        drawn = self.draw()
        self.order.sort(key=lambda number: (number * drawn * self.epochs) % 23)
        return iter(self.order)

    def draw(self) -> int:
        if self.rng is None:
            self.rng = random.Random(3)
        if isinstance(self.rng, torch.Generator):
            return int(torch.randint(1, 22, (), generator=self.rng))
        rng = self.rng
        while not hasattr(rng, "integers") and not hasattr(rng, "randint"):
            rng = rng["it"] if isinstance(rng, dict) else rng[-1] if isinstance(rng, list) else rng.rng
        if isinstance(rng, Counted):
            return rng.randint(1, 22)
        return int(rng.integers(1, 22) if hasattr(rng, "integers") else rng.randint(1, 22))


class Counted:
    def __init__(self) -> None:
        self.number = 3

    def randint(self, low: int, high: int) -> int:
        self.number = self.number * 7 % 19
        return low + self.number


class Held:
    def __init__(self, rng: Any) -> None:
        self.rng = rng


class Batches(Sampler[list[int]]):
    """A batch sampler around another sampler, with its own numbers."""

    def __init__(self, within: Sampler[int], size: int = 4) -> None:
        self.within, self.of, self.rng = within, size, np.random.RandomState(4)

    def __len__(self) -> int:
        return -(-NUM_SAMPLES // self.of)

    def __iter__(self) -> Iterator[list[int]]:
        numbers = list(self.within)
        batches = [numbers[i : i + self.of] for i in range(0, NUM_SAMPLES, self.of)]
        return iter([batches[i] for i in self.rng.permutation(len(batches))])


class Kept(Own):
    """Says its state by itself, which is more than its attributes show."""

    def __init__(self) -> None:
        numbers = [3]
        super().__init__(random.Random(1), numbers=lambda: numbers)

    def draw(self) -> int:
        found: list[int] = vars(self)["numbers"]()
        found.append(found[-1] * 5 % 17)
        return found[-1]

    def state_dict(self) -> dict[str, int]:
        return {"last": vars(self)["numbers"]()[-1]}

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self)["numbers"]().append(state["last"])


SAMPLERS: dict[str, Callable[[], Any]] = {
    "numpy": lambda: Own(np.random.default_rng(5)),
    "philox": lambda: Own(np.random.Generator(np.random.Philox(5))),
    "legacy-numpy": lambda: Own(np.random.RandomState(5)),
    "python": lambda: Own(random.Random(5)),
    "torch": lambda: Own(own()),
    "made-later": lambda: Own(None),
    "several": lambda: Own([random.Random(5), np.random.default_rng(5)]),
    "by-name": lambda: Own({"it": random.Random(5)}),
    "within-a-part": lambda: Own(Held(Held(random.Random(5)))),
    "counting-part": lambda: Own(Counted()),
    "state-dict": Kept,
}


def of(**options: Any) -> DataLoader[Any]:
    return DataLoader(Samples(), batch_size=4, **options)


LOADERS: dict[str, MakeLoader] = {
    "in-order": of,
    "shuffled": lambda: of(shuffle=True),
    "drop-last": lambda: of(shuffle=True, drop_last=True),
    "own-generator": lambda: of(shuffle=True, generator=own()),
    "no-batches": lambda: DataLoader(Samples(), batch_size=None, shuffle=True),
    "with-replacement": lambda: of(sampler=RandomSampler(Samples(), replacement=True, num_samples=40)),
    "weighted": lambda: of(sampler=WeightedRandomSampler([1.0 + i for i in range(NUM_SAMPLES)], 20)),
    "batch-sampler": lambda: DataLoader(Samples(), batch_sampler=BatchSampler(RandomSampler(Samples()), 4, False)),
    "custom-batch-sampler": lambda: DataLoader(Samples(), batch_sampler=Backwards()),
    "state-of-their-own": lambda: DataLoader(
        Samples(), batch_sampler=Batches(Own([own(), random.Random(5), np.random.default_rng(5)]))
    ),
    "distributed": distributed,
    "stateful": lambda: StatefulDataLoader(Samples(), batch_size=4, shuffle=True),
    "iterable": lambda: DataLoader(Stream(), batch_size=4),
    "stateful-iterable": lambda: StatefulDataLoader(Stream(), batch_size=4),
    "workers": lambda: of(shuffle=True, num_workers=2),
    "persistent-workers": lambda: of(shuffle=True, num_workers=2, persistent_workers=True),
    "iterable-workers": lambda: DataLoader(Stream(), batch_size=4, num_workers=2),
}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata
@pytest.mark.parametrize("kind", LOADERS)
def test_resumed_losses_equal_those_of_the_uninterrupted_run(kind: str, tmp_path: Path) -> None:
    losses, found, whole, resumed = interrupted(LOADERS[kind], tmp_path, at=8, num_epochs=3)
    assert found == losses
    assert same_state(resumed.model.state_dict(), whole.model.state_dict())
    assert resumed.seen == whole.seen[8:]
    if kind == "shuffled":  # samples before the position are not loaded
        assert resumed.loader.dataset.loaded == whole.loader.dataset.loaded[30:]


@pytest.mark.parametrize("at", [1, 6, 7])
@pytest.mark.parametrize("kind", ["own-generator", "distributed", "iterable"])
def test_positions_at_the_edges_of_epochs(kind: str, at: int, tmp_path: Path) -> None:
    losses, found, _, _ = interrupted(LOADERS[kind], tmp_path, at, num_epochs=2)
    assert found == losses


@pytest.mark.parametrize("kind", ["samples", "samples-with-generator", "stream"])
def test_persistent_workers_are_resumed_between_epochs(kind: str) -> None:
    def make() -> ResumableLoader[Any]:
        if kind == "stream":
            loader = DataLoader(Stream(), batch_size=4, num_workers=1, persistent_workers=True)
        else:
            generator = own() if "generator" in kind else None
            loader = of(shuffle=True, num_workers=1, persistent_workers=True, generator=generator)
        return ckpt.data.resumable(loader)

    def epoch(loader: ResumableLoader[Any]) -> tuple[list[Any], float]:
        return [batch.tolist() for batch in loader], float(torch.rand(()))

    seed_all(3)
    loader = make()
    epoch(loader)
    state, random_state = loader.state_dict(), host_rng_state()
    expected = epoch(loader)
    for _ in range(2):  # the second time from the position that the first one saves without an iteration
        resumed = make()
        resumed.load_state_dict(state)
        state = resumed.state_dict()
        load_rng_state(random_state)
        assert epoch(resumed) == expected


class Files(Dataset[int]):
    """A data set whose workers open a file each."""

    opened: int

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return self.opened + index


def open_file(number: int) -> None:
    worker: Any = torch.utils.data.get_worker_info()
    worker.dataset.opened = 10 * (number + 1)


def test_workers_may_set_attributes_of_their_data_set() -> None:
    loader: Any = ckpt.data.resumable(DataLoader(Files(), batch_size=2, num_workers=1, worker_init_fn=open_file))
    assert [batch.tolist() for batch in loader] == [[10, 11], [12, 13]]


def test_a_run_without_a_restore_gets_what_a_plain_loader_gives() -> None:
    seed_all(3)
    plain = [batch.tolist() for batch in LOADERS["shuffled"]()]
    seed_all(3)
    assert [batch.tolist() for batch in ckpt.data.resumable(LOADERS["shuffled"]())] == plain


def drawn(loader: ResumableLoader[Any], num_epochs: int, at: int = -1) -> tuple[list[list[int]], Any]:
    """The batches of epochs, and the position after `at` of them."""
    seen: list[list[int]] = []
    state = None
    for epoch in range(loader.epoch, num_epochs):
        loader.set_epoch(epoch)
        for batch in loader:
            seen.append(batch.int().tolist())
            if len(seen) == at:
                state = copy.deepcopy(loader.state_dict())
    return seen, state


@pytest.mark.parametrize("kind", [*SAMPLERS, "batches"])
def test_samplers_with_state_of_their_own_go_on(kind: str) -> None:
    def make() -> ResumableLoader[Any]:
        given: dict[str, Any] = {"batch_size": 4} if kind in SAMPLERS else {}
        name = "sampler" if given else "batch_sampler"
        given[name] = SAMPLERS[kind]() if given else Batches(Own(np.random.default_rng(5)))
        return ckpt.data.resumable(DataLoader(range(NUM_SAMPLES), **given))  # type: ignore[arg-type]

    for at in (8, 12, 13):
        whole, state = drawn(make(), 4, at)
        again = make()
        again.load_state_dict(state)
        assert drawn(again, 4)[0] == whole[at:]
    assert len({str(whole[i : i + 6]) for i in range(0, 24, 6)}) > 2


@pytest.mark.parametrize("at", [8, 12])
def test_what_training_sets_in_a_sampler_within_an_epoch_counts_from_the_next_on(at: int) -> None:
    def run(num_epochs: int, at: int, state: Any = None) -> tuple[list[list[int]], Any]:
        sampler = WeightedRandomSampler([1.0] * NUM_SAMPLES, 24, generator=own())
        loader: Any = ckpt.data.resumable(DataLoader(range(NUM_SAMPLES), 4, sampler=sampler))  # type: ignore[arg-type]
        if state is not None:
            loader.load_state_dict(state)
        seen = []
        for _ in range(loader.epoch, num_epochs):
            for batch in loader:
                seen.append(batch.tolist())
                sampler.weights[batch] *= 3
                if len(seen) == at:
                    return seen, copy.deepcopy(loader.state_dict())
        return seen, None

    first, state = run(4, at)
    assert first + run(4, -1, state)[0] == run(4, -1)[0]


def test_an_iterator_in_a_sampler_is_refused_at_the_first_save() -> None:
    loader = ckpt.data.resumable(of(sampler=Own(random.Random(5), more=iter([1]))))
    with pytest.raises(UnsupportedObject, match=r"'sampler.more' is a builtins.list_iterator"):
        loader.state_dict()


def position_in(make: MakeLoader, num_batches: int) -> tuple[list[int], dict[str, Any]]:
    loader = ckpt.data.resumable(make())
    batches = iter(loader)
    seen = [int(number) for _ in range(num_batches) for number in next(batches).reshape(-1, 4)[:, 0]]
    return seen, loader.state_dict()


@pytest.mark.parametrize("sizes", [(2, 4, 3), (4, 2, None), (None, 5, 1)])
@pytest.mark.parametrize("options", [{"shuffle": True}, {}, {"sampler": Own}])
def test_another_batch_size_counts_samples(options: dict[str, Any], sizes: tuple[int | None, ...]) -> None:
    """With a size for two batches, then another one for two more, and a third one for the rest."""
    seen, state = [], None
    for number, size in enumerate(sizes):
        given = {**options, "sampler": Own(random.Random(2))} if "sampler" in options else options
        loader = ckpt.data.resumable(DataLoader(Samples(noise=False), batch_size=size, **given))
        if state is not None:
            loader.load_state_dict(state)
        for batch in loader:
            seen += batch.reshape(-1, 4)[:, 0].int().tolist()
            if number < 2 and loader.num_batches == 2:
                break_at = loader.state_dict()
                break
        state = break_at
    assert sorted(seen) == list(range(NUM_SAMPLES))


class Sized(BatchSampler):
    """A batch sampler of a class of its own."""


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda size: DataLoader(Samples(), batch_sampler=Sized(RandomSampler(Samples()), size, False)), "batch_size"),
        (lambda size: DataLoader(Samples(), batch_sampler=Batches(Own(random.Random(5)), size)), "batch_sampler.of"),
        (lambda size: DataLoader(Samples(), batch_size=4, sampler=Own(random.Random(5), seed=size)), "sampler.seed"),
        (lambda size: DataLoader(Samples(), batch_size=4, sampler=list(range(size, 20))), "otherwise here: sampler"),
        (lambda size: DataLoader(Stream(), batch_size=size), "batch_size"),
        (lambda size: DataLoader(Stream(), batch_size=2, num_workers=size - 1), "num_workers"),
        (lambda size: StatefulDataLoader(Stream(), batch_size=size), "batch_size"),
    ],
)
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata
def test_other_arguments_within_an_epoch_are_refused(make: Callable[[int], DataLoader[Any]], name: str) -> None:
    _, state = position_in(lambda: make(3), 2)
    with pytest.raises(StateMismatch, match=name):
        ckpt.data.resumable(make(2)).load_state_dict(state)
    same = ckpt.data.resumable(make(3))
    same.load_state_dict(state)
    for _ in same:
        pass
    other = ckpt.data.resumable(make(2))  # between epochs they may differ
    other.load_state_dict(same.state_dict())


@pytest.mark.parametrize(("num_epochs", "first"), [((4, 8, 8), 0), *product([(4, 5, 6), (5, 5, 5)], range(3))])
def test_several_loaders_do_not_rewind_each_other(num_epochs: tuple[int, ...], first: int) -> None:
    """Each has epochs of another length; they begin in another order after the restore. Dropout draws as well."""

    def start(order: int) -> tuple[list[ResumableLoader[Any]], Callable[[int], list[Any]]]:
        found = [ckpt.data.resumable(DataLoader(Samples(noise=False), batch_size=5, shuffle=True)) for _ in range(3)]
        for loader, size in zip(found, num_epochs, strict=True):
            loader.dataset.num_samples = 5 * size
        ones = [loader.endless() for loader in found]

        def step(number: int) -> list[Any]:
            turn = [(order * (number == 0) + i) % 3 for i in range(3)]
            batches = {i: next(ones[i])[:, 0].tolist() for i in turn}
            return [*(batches[i] for i in range(3)), float(torch.rand(()))]

        return found, step

    seed_all(3)
    whole, step = start(0)
    for number in range(8):
        step(number + 1)
    states, random_state = [loader.state_dict() for loader in whole], host_rng_state()
    expected = [step(number + 1) for number in range(9)]
    seed_all(8)
    again, step = start(first)
    once = RngOnce(lambda: load_rng_state(random_state))
    for loader, state in zip(again, states, strict=True):
        loader.load_state_dict(state)
        loader.restore_rng_at_position(once)
    load_rng_state(random_state)
    assert [step(number) for number in range(9)] == expected


def test_endless_goes_through_all_epochs_and_resumes() -> None:
    run = Run(LOADERS["distributed"])
    batches = run.loader.endless()
    seen = [next(batches)[:, 0].tolist() for _ in range(11)]
    state = run.loader.state_dict()
    seen += [next(batches)[:, 0].tolist() for _ in range(4)]
    assert (run.loader.epoch, run.loader.num_batches) == (3, 3)
    other = Run(LOADERS["distributed"]).loader
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert (other.epoch, other.num_batches) == (2, 3)
    rest = other.endless()
    assert [next(rest)[:, 0].tolist() for _ in range(4)] == seen[11:]
    assert seen[:4] != seen[4:8]


class Squares(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index * index


@pytest.mark.parametrize("given", [{"sampler": [3, 1, 2, 0], "batch_size": 2}, {"batch_sampler": [[3, 1], [2, 0]]}])
def test_a_data_set_without_a_length(given: dict[str, Any]) -> None:
    first: Any = ckpt.data.resumable(DataLoader(Squares(), **given))
    batches = iter(first)
    assert next(batches).tolist() == [9, 1]
    second: Any = ckpt.data.resumable(DataLoader(Squares(), **given))
    second.load_state_dict(first.state_dict())
    assert [batch.tolist() for batch in second] == [[4, 0]]


def test_endless_goes_on_from_a_position_that_is_loaded_meanwhile() -> None:
    loader = ckpt.data.resumable(LOADERS["in-order"]())
    batches = loader.endless()
    next(batches)
    state = loader.state_dict()
    expected = [next(batches)[:, 0].tolist() for _ in range(2)]
    loader.load_state_dict(state)
    assert [next(batches)[:, 0].tolist() for _ in range(2)] == expected
    assert loader.num_batches == 3


def test_an_iteration_ends_when_a_position_is_loaded() -> None:
    loader = ckpt.data.resumable(LOADERS["in-order"]())
    going = iter(loader)
    next(going)
    state = loader.state_dict()
    second = next(going)[:, 0].tolist()
    loader.load_state_dict(state)
    assert next(going, None) is None
    assert loader.state_dict() == state
    again = iter(loader)
    assert next(again)[:, 0].tolist() == second


def test_an_iteration_that_is_dropped_counts_as_an_epoch() -> None:
    loader = ckpt.data.resumable(LOADERS["in-order"]())
    for _ in loader:
        break
    assert (loader.epoch, loader.num_batches) == (1, 0)
    assert loader.state_dict()["batches"] is None


def test_an_epoch_whose_last_batch_was_received_can_be_ended() -> None:
    loader, other = (ckpt.data.resumable(DataLoader(Samples(), batch_size=4)) for _ in range(2))
    iteration = iter(loader)
    for _ in range(len(loader)):
        next(iteration)
    assert loader.epoch == 0
    loader.end_epoch()
    other.load_state_dict(loader.state_dict())
    assert (other.epoch, len(list(other))) == (1, len(loader))
    other.end_epoch()  # between epochs: no effect
    assert other.epoch == 2


def test_another_epoch_than_the_restored_one_is_refused() -> None:
    first = ckpt.data.resumable(LOADERS["distributed"]())
    first.set_epoch(1)
    batches = iter(first)
    next(batches)
    second = ckpt.data.resumable(LOADERS["distributed"]())
    second.load_state_dict(first.state_dict())
    with pytest.raises(InvalidRequest, match="restored in epoch 1, and is to begin epoch 0"):
        second.set_epoch(0)
    second.sampler.set_epoch(0)
    with pytest.raises(InvalidRequest, match="to begin epoch 0"):
        iter(second)


def test_states_of_other_loaders_are_refused_before_anything_is_changed(tmp_path: Path) -> None:
    run, other = Run(LOADERS["shuffled"]), Run(LOADERS["distributed"], seed=1)
    before = copy.deepcopy(other.model.state_dict())
    with ckpt.Checkpointer(str(tmp_path), run="r", writer="thread") as checkpointer:
        checkpointer.save(run.model, run.optim, 1, loader=run.loader, plain={"at": 3})
        with pytest.raises(StateMismatch, match="RandomSampler, and is a loader with DistributedSampler here"):
            checkpointer.restore(other.model, loader=other.loader, plain=None)
        with pytest.raises(StateMismatch, match="not the position"):
            checkpointer.restore(other.model, plain=other.loader, loader=None)
    assert same_state(other.model.state_dict(), before)


def test_what_is_no_loader_is_refused() -> None:
    empty: Any = []
    with pytest.raises(InvalidRequest, match="a list is not a data loader"):
        ckpt.data.resumable([1, 2])  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="no batches"):
        next(ckpt.data.resumable(DataLoader(empty)).endless())
    loader: ResumableLoader[Any] = ckpt.data.resumable(LOADERS["in-order"]())
    assert ckpt.data.resumable(loader) is loader  # type: ignore[arg-type]
    assert (len(loader), loader.batch_size) == (6, 4)


_JOB = "tests.ckpt.data.killed"


def test_every_later_loss_and_the_weights_of_two_ranks_with_workers_are_equal(tmp_path: Path) -> None:
    """Of 22 samples in batches of 2: epochs of 6 steps."""
    with Job(_JOB, [str(tmp_path / "whole"), "2"], 2) as job:
        whole = job.finish()
    store = tmp_path / "killed"
    resumed, lines = killed_and_resumed(_JOB, [str(store), "2"], 2, 10, ranks=2)
    assert (resumed, sorted(lines)) == (9, sorted(whole))
    assert invoke("verify", "killed@latest", "--store", store).code == 0


def test_each_sample_once_when_the_number_of_killed_ranks_changes(tmp_path: Path) -> None:
    """60 samples: two ranks take 12 of them and are killed, three take 18, and one takes the rest."""
    arguments, environment = [str(tmp_path), "0"], {"SAMPLES": "60"}
    lines: list[list[str]] = []
    for world_size, at, resumes in ((2, 4, 0), (3, 7, 3), (1, 23, 6)):
        with Job(_JOB, arguments, world_size, environment) as job:
            found = job.until(at, world_size)
        resumed = next((int(words[1]) for words in found if words[0] == "resumed"), 0)
        assert resumed == resumes
        lines = [*kept(lines, resumed), *found]
    steps = [words for words in lines if words[0] == "step" and words[4] == "0"]
    assert {int(words[1]) for words in steps} == {0, 1, 2}
    assert Counter(int(number) for words in steps for number in words[5].split(",")) == Counter(range(60))
