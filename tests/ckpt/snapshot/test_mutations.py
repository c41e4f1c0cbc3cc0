"""Random lives of saves whose state is changed, run in other processes: a crash is a finding.

CKPTD_LIFE_CYCLES says how many are tried; a few by default.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ckpt import Checkpointer, SaveHandle
from ckpt.snapshot import overlap, stage
from ckpt.snapshot.guard import Guard
from ckptstore.errors import CkptError
from ckptstore.reading.source import StoreSource
from ckptstore.stores import open_store
from tests.ckpt.snapshot.mutations import MUTATIONS, Mutation, Subject
from tests.support.parallel.runner import Outcome, Scenario, run_scenarios
from tests.support.training import same_state
from tests.support.waiting import wait_until

_NUMBER = int(os.environ.get("CKPTD_LIFE_CYCLES", 50))
_OF_TWO_RANKS = 3 * _NUMBER // 10


def _lives(store: Path, numbers: range, world_size: int) -> Scenario:
    arguments: dict[str, Any] = {"store": str(store), "numbers": list(numbers)}
    return Scenario(f"{__name__}:live", world_size, arguments, timeout_s=120 + 10 * len(numbers))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    folder = tmp_path_factory.mktemp("mutations")
    one = _lives(folder / "one", range(_NUMBER - _OF_TWO_RANKS), 1)
    two = _lives(folder / "two", range(_NUMBER - _OF_TWO_RANKS, _NUMBER), 2)
    return run_scenarios([one, two], folder / "ranks")


@pytest.mark.timeout(240 + 10 * _NUMBER)
@pytest.mark.parametrize("scenario", [0, 1], ids=["one rank", "two ranks"])
def test_what_is_committed_is_the_state_of_the_call(outcomes: list[Outcome], scenario: int) -> None:
    for result in outcomes[scenario].result():
        ended: Counter[str] = Counter(result)
        print(dict(ended))
        assert ended["committed"] >= 5
        assert ended["snapshot_torn"] + ended["rank_failed"] >= 1
        assert ended.total() == ended["committed"] + ended["snapshot_torn"] + ended["rank_failed"]


_PATIENCE_S = 60
_SMALL = ((100,), (4098,), (6000,), (70_000,), (300_000,), (600_000,))


@dataclass(frozen=True)
class Life:
    """What happens in one life; equal on all ranks."""

    number: int
    overlap: Literal[True, False, "verify"]
    optimizer: str
    sizes: Sequence[tuple[int, ...]]
    piece_bytes: int
    mutation: str
    point: int | None
    """How many events of the copy precede the change; None: the copy runs at its own pace."""
    undo_after: int | None
    """How many more events precede the undoing of the change."""
    saves: int
    """How many saves precede this one."""
    steps: bool
    """Whether an optimizer steps after the change."""
    mutating: tuple[int, ...]
    """The ranks that change their state."""

    @staticmethod
    def draw(number: int) -> Life:
        rng = random.Random(number)
        name, sizes = rng.choice(list(MUTATIONS)), rng.choices(_SMALL, k=rng.randint(1, 6))
        events = 4 * len(sizes)
        point = rng.choice([0, rng.randrange(events), rng.randrange(events), None])
        if point is None and not MUTATIONS[name].races:
            point = 0
        return Life(
            number=number, overlap=rng.choice([True, True, "verify", "verify", False]),
            optimizer=rng.choice(["sgd", "adamw", "foreach", "fused"]), sizes=sizes,
            piece_bytes=rng.choice([64 << 10, 1 << 20, 16 << 20]), mutation=name, point=point,
            undo_after=rng.randint(1, 8) if rng.random() < 0.5 else None, saves=rng.choice([0, 0, 1, 2]),
            steps=rng.random() < 0.5, mutating=rng.choice([(0,), (1,), (0, 1)]),
        )  # fmt: skip


class Pauses:
    """Holds the copier once the number of events is reached, until it is released."""

    def __init__(self, between: bool) -> None:
        """between: the moment between the copy of some bytes and their check is an event, too."""
        self.between = between
        self._changed = threading.Condition()
        self._events = 0
        self._stop: int | None = None
        self.held = False

    def hold_after(self, events: int | None) -> None:
        """Hold the copier after so many more events, or never; releases it until then."""
        with self._changed:
            self._stop = None if events is None else self._events + events
            self.held = False
            self._changed.notify_all()

    def event(self) -> None:
        with self._changed:
            if self._stop is not None and self._events >= self._stop:
                self.held = True
                assert self._changed.wait_for(lambda: not self.held, _PATIENCE_S), "the copier was not released"
            self._events += 1


class PausingGuard:
    def __init__(self, guard: Guard, pauses: Pauses) -> None:
        self._guard = guard
        self._pauses = pauses

    def moved(self, index: int) -> bool:
        self._pauses.event()
        return self._guard.moved(index)

    def copied(self, index: int, address: int, num_bytes: int) -> bool:
        if self._pauses.between:
            self._pauses.event()
        unchanged = self._guard.copied(index, address, num_bytes)
        self._pauses.event()
        return unchanged

    def changed(self, indexes: Iterable[int]) -> list[str]:
        return self._guard.changed(indexes)


def live(store: str, numbers: Sequence[int]) -> dict[str, int]:
    """Live these lives, one after the other. AssertionError names the first one that goes wrong."""
    ended: Counter[str] = Counter()
    for number in numbers:
        life = Life.draw(number)
        print(life, flush=True)  # the last one is that of a crash
        ended[_live(life, Path(store, f"life-{number}"))] += 1
    return dict(ended)


def _live(life: Life, store: Path) -> str:
    torch.manual_seed(life.number)
    subject, pauses = Subject(list(life.sizes), life.optimizer), Pauses(between=life.overlap == "verify")
    kind = "DigestGuard" if life.overlap == "verify" else "ChangeGuard"
    make = getattr(overlap, kind)

    def guard(*kept: Any) -> PausingGuard:
        return PausingGuard(make(*kept), pauses)

    options: dict[str, Any] = {"overlap": life.overlap, "writer": "thread", "compress": "off", "split_replicas": True}
    with (
        patch.object(overlap, kind, guard),
        patch.object(stage, "_MOVED_BYTES", life.piece_bytes),
        Checkpointer(str(store), run="life", **options) as checkpointer,
    ):
        for step in range(life.saves):
            checkpointer.save(subject.model, subject.optim, step, ema=subject.ema)
            subject.step()
        state = subject.state()
        if life.point is not None:
            pauses.hold_after(life.point)
        handle = checkpointer.save_async(subject.model, subject.optim, 100, ema=subject.ema)
        tears = _mutate(life, subject, pauses, handle)
        error = handle.exception() if handle._finished.wait(_PATIENCE_S) else TimeoutError()
        if dist.is_initialized():
            dist.barrier()
        stored = {found.step for found in StoreSource(open_store(str(store))).checkpoints("life")}
        assert (100 in stored) == (error is None), (life, error, stored)
        assert error is None or (isinstance(error, CkptError) and any(_gathered(tears))), (life, error)
        if error is None:
            loaded = checkpointer.load(100)
            wrong = [name for name in state if name not in loaded or not same_state(loaded[name], state[name])]
            assert loaded.keys() == state.keys(), (life, loaded.keys() ^ state.keys())
            assert not wrong, (life, wrong)
        _gathered(None)
    if _rank() == 0:
        shutil.rmtree(store, ignore_errors=True)  # nothing may have been stored
    return error.code if isinstance(error, CkptError) else "committed"


def _mutate(life: Life, subject: Subject, pauses: Pauses, handle: SaveHandle) -> bool:
    """Change the state at the point, and undo it if need be. Returns whether that may fail the save."""
    mutation, rng = MUTATIONS[life.mutation], random.Random(life.number)
    mutates = dist.get_world_size() == 1 or _rank() in life.mutating if dist.is_initialized() else True
    tears = mutates and not mutation.harmless and life.overlap is not False
    try:
        if life.point is not None:
            _wait_for_point(pauses, handle)
            tears = tears and not handle.staged()
        if mutates:
            _change(life, mutation, subject, pauses, handle, rng)
    finally:
        pauses.hold_after(None)
    if life.steps and subject.steps:
        subject.step()
    return tears


def _change(
    life: Life, mutation: Mutation, subject: Subject, pauses: Pauses, handle: SaveHandle, rng: random.Random
) -> None:
    every = life.overlap is not True
    if mutation.waits:
        errors: list[BaseException] = []

        def run() -> None:
            try:
                mutation.change(subject, rng, every)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(0.02)
        pauses.hold_after(None)
        thread.join(_PATIENCE_S)
        assert not thread.is_alive(), life
        assert not errors, (life, errors)
        return
    undo = mutation.change(subject, rng, every)
    # A change that is undone while its tensor is being copied is one of the exceptions.
    if undo is not None and life.undo_after is not None and (every or life.point is not None):
        if life.point is not None:
            pauses.hold_after(life.undo_after)
            _wait_for_point(pauses, handle)
        undo()


def _wait_for_point(pauses: Pauses, handle: SaveHandle) -> None:
    """Until the copier is held, or has nothing more to copy."""
    wait_until(lambda: pauses.held or handle.staged() or handle.done(), deadline_s=_PATIENCE_S)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _gathered(value: Any) -> list[Any]:
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


if __name__ == "__main__":
    print(live(sys.argv[1], range(int(sys.argv[2]), int(sys.argv[3]))))
