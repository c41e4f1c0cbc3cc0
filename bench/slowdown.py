"""Training time that a save costs: the time in the call, and the extra time of later steps until it is durable.

One process trains with one thread on a model of the size of the state. Windows without a save and windows with one
take turns, and so do the contestants: steps with a save in flight are compared with the steps right before and after.
The window after one save is the window before the next.
All contestants are equally durable, fsynced, and have saved once before, so memory and processes exist.

There are two scenes. In the first the other cores are free. In the second data-loader workers need them all: what a
save takes from them, training waits for as well.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from bench.measuring import REPETITIONS, Spread, core_seconds, in_turns, problem, seconds
from bench.ours import Ours
from bench.peers import open_peers
from bench.peers.peer import Peer
from bench.report import Goal, Report
from bench.state import State, batch, sources, trained, wanted_bytes

GOAL, OFF_GOAL = 0.5, 1 / 3
STEPS_AROUND = 2
"""Steps without a save, before and after each save."""
TOKENS = 16
PEERS = ("dcp-process", "torch_checkpointing", "moonclip")
"""dcp-thread and torchsnapshot, which lost four times as much as the best of these, would only make this longer."""
OURS: dict[str, dict[str, Any]] = {
    "ckptd": {},
    "ckptd, off": {"compress": "off"},
    "ckptd, fast": {"compress": "fast"},
    "ckptd, local tier": {"local": True},
}
"""The first is the default, and the headline; the second has a goal too."""
FREE, BUSY = "free cores", "busy cores"
WORK = 1.1
"""Processor time that the workers want for each step, relative to what the cores have beside training."""
BUSY_STEPS_AROUND = 4  # workers deliver in bunches, so steps differ more


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one save."""

    stall_s: float
    lost_s: float
    """Stall, and the sum of the extra time of the steps until the save was durable."""
    step_ratio: float
    """Mean of those steps over the ones without a save."""
    durable_s: float
    core_s: float
    """Processor time of all processes, less that of as many steps without a save."""


@dataclass(frozen=True, slots=True)
class Window:
    """Steps without a save in flight."""

    steps: list[float]
    """Seconds of each."""
    core_s: float
    """Processor time of a step, of all processes."""


class Trainer:
    """Steps of one thread on a live state."""

    def __init__(self, state: State) -> None:
        assert state.optim is not None
        self.state, self.optim = state, state.optim
        self.text = sources()
        self.batches: Iterator[Tensor] = _batches(self.text)
        self.around, self.settling = STEPS_AROUND, 0
        """Steps that are measured before and after each save, and steps before these: while nothing trained, the
        workers have made batches in advance."""
        self.last_window: Window | None = None
        """The last window. None: other things were done since."""
        for group in self.optim.param_groups:
            group["lr"] = 0.0  # a tiled model does not train; the work is the same

    def steps(self, number: int) -> list[float]:
        """Seconds of each step, without a save in flight."""
        return [self.step(None) for _ in range(number)]

    def window(self) -> Window:
        """Steps without a save in flight, after those that settle what was done before."""
        self.steps(self.settling)
        at = core_seconds()
        steps = self.steps(self.around)
        self.last_window = Window(steps, (core_seconds() - at) / self.around)
        return self.last_window

    def step(self, peer: Peer | None) -> float:
        """Seconds of one step."""
        return seconds(lambda: self._step(peer))

    def _step(self, peer: Peer | None) -> None:
        self.state.model.loss(next(self.batches)).backward()  # type: ignore[no-untyped-call]
        if peer is None:
            self.optim.step()
        else:
            with peer.before_step():
                self.optim.step()
        self.optim.zero_grad()


def _batches(text: Tensor) -> Iterator[Tensor]:
    while True:
        yield batch(text, 1, TOKENS)


class Loaded(IterableDataset[Tensor]):
    """Batches, each of which takes this much processor time to make, as decoding and augmenting do."""

    def __init__(self, text: Tensor, work_s: float) -> None:
        self._text, self._work_s = text, work_s

    def __iter__(self) -> Iterator[Tensor]:
        block = self._text.numpy().tobytes()[: 64 << 10]
        for one in _batches(self._text):
            end = time.process_time() + self._work_s
            while time.process_time() < end:
                zlib.compress(block)
            yield one


@contextmanager
def busy_cores(trainer: Trainer) -> Iterator[None]:
    """Workers of a data loader make the batches, and need all cores for it."""
    cores = os.cpu_count() or 1
    dataset = Loaded(trainer.text, WORK * max(1, cores - 1) * median(trainer.steps(STEPS_AROUND)))
    loader = DataLoader(dataset, None, num_workers=cores, prefetch_factor=1, multiprocessing_context="fork")
    trainer.batches = iter(loader)
    trainer.around, trainer.settling, trainer.last_window = BUSY_STEPS_AROUND, cores, None
    try:
        yield
    finally:
        trainer.batches = _batches(trainer.text)  # the last reference to the workers
        trainer.around, trainer.settling, trainer.last_window = STEPS_AROUND, 0, None


class Saving:
    """A save for which a thread waits, while training continues."""

    def __init__(self, peer: Peer, state: State, folder: Path) -> None:
        self.error: BaseException | None = None
        self.stall_s = seconds(lambda: self._start(peer, state, folder))
        self.thread = threading.Thread(target=self._wait)
        self.durable_s = self.stall_s
        self.thread.start()

    def _start(self, peer: Peer, state: State, folder: Path) -> None:
        self.wait = peer.start_save(state, folder)

    def _wait(self) -> None:
        try:
            self.durable_s += seconds(self.wait)
        except BaseException as error:
            self.error = error

    @property
    def in_flight(self) -> bool:
        """Whether the save is still in flight: neither durable nor failed."""
        return self.thread.is_alive()

    def end(self) -> None:
        """Raise its error."""
        self.thread.join()
        if self.error is not None:
            raise self.error


def measure(quick: bool) -> Report:
    """Measure over a folder of the default temporary file system."""
    torch.set_num_threads(1)
    state = trained("fp32", wanted_bytes(quick))
    trainer = Trainer(state)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        peers, problems = open_peers(PEERS, stack)
        contestants: dict[str, Peer] = {
            ours: stack.enter_context(Ours(Path(name), **options)) for ours, options in OURS.items()
        }
        contestants |= peers
        folders = (Path(name, str(number)) for number in count())
        trainer.steps(1)
        for contestant, peer in list(contestants.items()):
            try:
                cost(trainer, peer, next(folders))
            except Exception as error:  # a peer may raise anything
                problems[contestant] = problem(error)
                del contestants[contestant]
        found: dict[str, dict[str, list[Cost]]] = {}
        for scene, entered in ((FREE, nullcontext()), (BUSY, busy_cores(trainer))):
            turns = {name: partial(_next_cost, trainer, peer, folders) for name, peer in contestants.items()}
            with entered:
                found[scene], more = in_turns(turns)
            problems |= {f"{name}, {scene}": why for name, why in more.items()}
    return report(state, found, problems)


def _next_cost(trainer: Trainer, peer: Peer, folders: Any) -> Cost:
    return cost(trainer, peer, next(folders))


def cost(trainer: Trainer, peer: Peer, folder: Path) -> Cost:
    """Cost of one save, with steps before, during and after it."""
    before = trainer.last_window or trainer.window()
    at = core_seconds()
    saving = Saving(peer, trainer.state, folder)
    slow = [trainer.step(peer)]  # at least one: it waits for a copy in progress
    while saving.in_flight:
        slow.append(trainer.step(peer))
    saving.end()
    core_s = core_seconds() - at
    peer.discard(folder)
    after = trainer.window()
    step_s = median(before.steps + after.steps)
    return Cost(
        stall_s=saving.stall_s,
        lost_s=saving.stall_s + sum(slow) - step_s * len(slow),
        step_ratio=fmean(slow) / step_s,
        durable_s=saving.durable_s,
        core_s=core_s - (before.core_s + after.core_s) / 2 * len(slow),
    )


def report(state: State, found: dict[str, dict[str, list[Cost]]], problems: dict[str, str]) -> Report:
    """Seconds lost per GB, by scene and contestant."""
    gigabytes = state.num_bytes / 1e9
    rows: list[tuple[str, ...]] = []
    goals: list[Goal] = []
    peers: dict[str, float] = {}
    facts: dict[str, float] = {}
    for scene, costs_of in found.items():
        lost = {name: Spread.of([cost.lost_s / gigabytes for cost in costs]) for name, costs in costs_of.items()}
        rows += [(scene, *_row(name, lost[name], costs)) for name, costs in costs_of.items()]
        others = {f"{name}, {scene}": spread.median for name, spread in lost.items() if name not in OURS}
        peers |= others
        best = min(others.values(), default=float("nan"))
        for name, goal in zip(OURS, (GOAL, OFF_GOAL), strict=False):
            ratio = lost[name].median / best if name in lost and best > 0 else float("nan")
            goals.append(Goal(f"lost time per save, {name}, {scene}", "best asynchronous peer", ratio, goal, "at most"))
        facts |= {f"{name}, {scene}": lost[name].median for name in OURS if name in lost}
        ratios = {name: median(cost.step_ratio for cost in costs) for name, costs in costs_of.items()}
        facts |= {f"{name}, {scene}, step ratio": ratio for name, ratio in ratios.items()}
    return Report(
        bench="slowdown",
        what=f"{gigabytes:.2f} GB, one thread trains, median (quartiles) of {REPETITIONS} in turns",
        columns=("scene", "", "lost s/GB", "stall s", "step ratio", "durable s", "core-s"),
        rows=rows,
        goals=goals,
        limit=0.0,
        peers=peers,
        problems=problems,
        state_bytes=state.num_bytes,
        facts=facts,
    )


def _row(name: str, lost: Spread, costs: list[Cost]) -> tuple[str, ...]:
    return (
        name,
        str(lost),
        f"{median(cost.stall_s for cost in costs):.4f}",
        f"{median(cost.step_ratio for cost in costs):.3f}",
        f"{median(cost.durable_s for cost in costs):.2f}",
        f"{median(cost.core_s for cost in costs):.2f}",
    )
