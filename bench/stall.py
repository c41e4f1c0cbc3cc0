"""Time for which a save blocks training, against one memcpy of the same bytes into touched memory.

One thread trains, and every save comes right after a step, as in any training: the step determines the contents of
the caches. Then training continues, so overlap has a forward and a backward during which to copy, and an optimizer
step that waits for it; the benchmark slowdown measures the cost of that wait. All contestants save the same live
state in turns, because the speed of memory drifts on shared machines. The first save of a new process is measured
separately, after `prepare()` and two steps; all others have saved once before.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.measuring import REPETITIONS, Spread, in_turns, problem, seconds, touched
from bench.ours import Ours
from bench.peers import open_peers
from bench.peers.peer import Peer
from bench.report import Goal, Report
from bench.slowdown import Trainer
from bench.state import State, trained, wanted_bytes

EAGER, OVERLAP = "ckptd, overlap=False", "ckptd"
OURS: dict[str, dict[str, Any]] = {OVERLAP: {}, EAGER: {"overlap": False}, "ckptd, local tier": {"local": True}}
PEERS = ("torch.save", "dcp-thread", "dcp-process", "torch_checkpointing", "torchsnapshot")
MEMCPY = "memcpy"
GOALS = {EAGER: 1.1, OVERLAP: 0.05}
FIRST_GOAL = 1.5


def measure(quick: bool) -> Report:
    """Measure over a folder of the default temporary file system."""
    torch.set_num_threads(1)
    state = trained("fp32", wanted_bytes(quick))
    trainer = Trainer(state)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folders = (Path(name, str(number)) for number in count())
        peers, problems = open_peers(PEERS, stack)
        ours = {each: Ours(Path(name), **options) for each, options in OURS.items()}
        for ckptd in ours.values():
            stack.enter_context(ckptd)
        first = {each: _first(trainer, peer, folders) for each, peer in ours.items()}
        contestants: dict[str, Callable[[], float]] = {MEMCPY: _memcpy(state)}
        for each, peer in (ours | peers).items():
            contestants[each] = _stall(trainer, peer, folders)
        problems |= _warm_up(contestants)
        found, more = in_turns(contestants, REPETITIONS)
    return _report(state, found, first, problems | more)


def _first(trainer: Trainer, ours: Ours, folders: Iterator[Path]) -> float:
    """Seconds of the first save after `prepare()`, which allocates memory while training continues."""
    ours.checkpointer.prepare(trainer.state.model, trainer.optim)
    trainer.steps(2)
    return _stall(trainer, ours, folders)()


def _stall(trainer: Trainer, peer: Peer, folders: Iterator[Path]) -> Callable[[], float]:
    """Seconds in the call of one save between two training steps; waits for the save afterwards."""

    def once() -> float:
        folder = next(folders)
        waits: list[Callable[[], None]] = []
        trainer.step(None)
        if peer.asynchronous:
            stall_s = seconds(lambda: waits.append(peer.start_save(trainer.state, folder)))
        else:
            stall_s = seconds(lambda: peer.save(trainer.state, folder))
        trainer.step(peer)
        for wait in waits:
            wait()
        peer.discard(folder)
        return stall_s

    return once


def _memcpy(state: State) -> Callable[[], float]:
    """Seconds of libc's memcpy of all tensors, one after the other."""
    target = ctypes.c_char.from_buffer(touched(state.num_bytes))

    def copy(sources: list[tuple[int, int]]) -> None:
        at = ctypes.addressof(target)
        for source, size in sources:
            ctypes.memmove(at, source, size)
            at += size

    def once() -> float:
        sources = [(tensor.data_ptr(), tensor.nbytes) for tensor in state.tensors().values()]
        return seconds(lambda: copy(sources))

    return once


def _warm_up(contestants: dict[str, Callable[[], float]]) -> dict[str, str]:
    """Call each contestant once; returns the errors of those that fail, which are left out."""
    problems = {}
    for name in list(contestants):
        try:
            contestants[name]()
        except Exception as error:  # a peer may raise anything
            problems[name] = problem(error)
            del contestants[name]
    return problems


def _report(state: State, found: dict[str, list[float]], first: dict[str, float], problems: dict[str, str]) -> Report:
    """Ratios to memcpy of the same round: it drifts."""
    spreads = {name: Spread.of(values) for name, values in found.items()}
    ratios = {name: _ratio(values, found[MEMCPY]) for name, values in found.items()}
    peers = {name: spread.median for name, spread in spreads.items() if name not in (MEMCPY, *OURS)}
    best = min(peers.values(), default=float("nan"))
    return Report(
        bench="stall",
        what=f"{state.num_bytes / 1e9:.2f} GB in {len(state.tensors())} tensors, one thread trains, median (quartiles) "
        f"of {REPETITIONS} in turns",
        columns=("", "stall s", "/ memcpy", "first s"),
        rows=[
            (name, str(spread), f"{ratios[name]:.4f}", f"{first[name]:.4f}" if name in first else "")
            for name, spread in spreads.items()
        ],
        goals=[
            *(Goal(name, MEMCPY, ratios.get(name, float("nan")), goal, "at most") for name, goal in GOALS.items()),
            Goal(OVERLAP, "best peer", spreads[OVERLAP].median / best, 1.0, "at most"),
            Goal("first save, eager", "later ones", first[EAGER] / spreads[EAGER].median, FIRST_GOAL, "at most"),
        ],
        limit=spreads[MEMCPY].median,
        peers=peers,
        problems=problems,
        state_bytes=state.num_bytes,
        facts={name: spreads[name].median for name in OURS} | {f"{name}, first": first[name] for name in first},
    )


def _ratio(values: list[float], limits: list[float]) -> float:
    return median(value / limit for value, limit in zip(values, limits, strict=True))
