"""Restores into the live tensors of a trained state, from a local disk. Shared by restore-cold and restore-warm.

Each contestant saves once, and loads in turns. Before each load the tensors are overwritten, and after it they are
compared bit by bit, neither of them timed. Before a cold load the page cache drops the files; before a warm one it has
read them, in the same way for all.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from bench.durable_disk import CODINGS, FAST, RAW, rows
from bench.measuring import (
    REPETITIONS,
    Usage,
    forget_cached,
    in_turns,
    memory,
    problem,
    read_files,
    sync_tree,
    touch_free_memory,
    usage,
)
from bench.ours import Ours
from bench.peers import open_peers
from bench.peers.peer import Peer
from bench.report import Goal, Report
from bench.state import State

PEERS = (
    "torch.save",
    "torch.load(mmap)",
    "dcp",
    "torch_checkpointing",
    "torchsnapshot",
    "moonclip",
    "safetensors",
    "runai-model-streamer",
)

RIVAL = "fastest peer that restores an optimizer"

Limits = Callable[[Path], Mapping[str, Callable[[], Usage]]]
"""From a shard of uncompressed chunks to bare reads of it, by name."""


@dataclass(slots=True)
class Restores:
    """The measurements."""

    num_bytes: int
    found: dict[str, list[Usage]]
    peaks: dict[str, int] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    tensors_only: Collection[str] = ()
    """Peers that restore tensors by name but no optimizer: listed, and excluded from the comparison."""

    def seconds(self, name: str) -> float:
        """Median, of one that ran."""
        return median(took.wall_s for took in self.found[name]) if name in self.found else float("nan")

    def best_peer(self) -> float:
        """Seconds of the fastest peer that restores an optimizer, as ours does."""
        rivals = [name for name in self.found if name in PEERS and name not in self.tensors_only]
        return min(map(self.seconds, rivals), default=float("nan"))

    def report(self, bench: str, what: str, limit: float, goals: list[Goal]) -> Report:
        """The table of both benchmarks."""
        return Report(
            bench=bench,
            what=f"{self.num_bytes / 1e9:.2f} GB, {what}, median (quartiles) of {REPETITIONS} in turns",
            columns=("", "seconds", "GB/s", "core-s", "extra memory"),
            rows=rows(
                self.num_bytes,
                {self._shown(name): took for name, took in self.found.items()},
                {self._shown(name): peak for name, peak in self.peaks.items()},
            ),
            goals=goals,
            limit=limit,
            peers={name: self.seconds(name) for name in self.found if name in PEERS},
            problems=self.problems,
            state_bytes=self.num_bytes,
            facts={f"{name}, seconds": self.seconds(name) for name in (RAW, FAST)}
            | {f"{name}, core-s": median(took.core_s for took in all_took) for name, all_took in self.found.items()},
        )

    def _shown(self, name: str) -> str:
        return f"{name} (tensors only)" if name in self.tensors_only else name


def restores(state: State, limits: Limits, *, cold: bool) -> Restores:
    """Measure all of them, in a folder of the default temporary file system."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        ours = {name: Ours(folder, compress=coding) for name, coding in CODINGS.items()}
        for saver in ours.values():
            stack.enter_context(saver)
        others, problems = open_peers(PEERS, stack)
        peers: dict[str, Peer] = {**ours, **others}
        places = {name: Path(ours[name].store) if name in ours else folder / name for name in peers}
        for name in list(peers):
            try:
                peers[name].save(state, folder / name)
            except Exception as error:  # a peer may raise anything
                problems[name] = problem(error)
                del peers[name]
        sync_tree(folder)
        contestants = dict(limits(_shard(places[RAW])))
        want = state.digest()
        loads = {name: _Load(peer, folder / name, places[name], state, want, cold) for name, peer in peers.items()}
        peaks, failed = in_turns({name: load.peak for name, load in loads.items()}, 1)
        contestants |= {name: loads[name].once for name in peaks}
        found, failed_later = in_turns(contestants, REPETITIONS)
    return Restores(
        num_bytes=state.num_bytes,
        found=found,
        peaks={name: peak[0] for name, peak in peaks.items()},
        problems=problems | failed | failed_later,
        tensors_only={name for name, peer in peers.items() if not peer.restores_optimizer},
    )


@dataclass(frozen=True, slots=True)
class _Load:
    """One contestant."""

    peer: Peer
    folder: Path
    place: Path
    state: State
    want: str
    cold: bool

    def once(self) -> Usage:
        """One load."""
        self.state.forget()
        if self.cold:
            forget_cached(self.place)
            touch_free_memory(self.state.num_bytes)
        else:
            read_files(self.place)
        with usage() as took:
            self.peer.load(self.folder, self.state)
        self._compare()
        return took

    def peak(self) -> int:
        """Extra memory of the first load."""
        self.state.forget()
        with memory() as took:
            self.peer.load(self.folder, self.state)
        self._compare()
        return took.extra_bytes

    def _compare(self) -> None:
        if self.state.digest() != self.want:
            raise ValueError("the loaded state differs from the saved one")


def bare(call: Callable[[], float]) -> Usage:
    """The duration of a call that returns its seconds."""
    with usage() as took:
        wall_s = call()
    took.wall_s = wall_s
    return took


def _shard(store: Path) -> Path:
    (path,) = store.rglob("*.ckpt")
    return path
