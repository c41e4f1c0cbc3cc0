"""From the call that saves to a checkpoint that is committed on the local disk, against a bare write of its bytes.

All contestants are equally durable: files and folders are fsynced. The bare write is preallocated and bypasses the
page cache, from existing memory; the better of one and two concurrent writes is the limit. The first save of each
contestant, which allocates buffers and processes, is not counted. Each save is loaded again once, and compared bit by
bit.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

from bench.measuring import (
    REPETITIONS,
    Spread,
    Usage,
    in_turns,
    memory,
    problem,
    raw_write_s,
    touched,
    usage,
)
from bench.ours import Ours
from bench.peers import SAVING, open_peers
from bench.peers.peer import Peer
from bench.report import Goal, Report
from bench.state import State, trained, wanted_bytes

RAW, FAST = "ckptd, raw", "ckptd, float-split"
CODINGS = {RAW: "off", FAST: "fast"}
BARE = {"bare write": 1, "bare write, 2 at a time": 2}
PEERS = ("torch.save", "dcp", "torch_checkpointing", "torchsnapshot", "moonclip", "safetensors")
TO_BEAT = ("torch.save", "dcp")
LIMIT_GOAL, RAW_GOAL, FAST_GOAL = 0.8, 3.0, 2.0

Found = Mapping[str, list[Usage]]


def measure(quick: bool) -> Report:
    """In a folder of the default temporary file system."""
    state = trained("fp32", wanted_bytes(quick))
    source = touched(state.num_bytes)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        ours = {name: stack.enter_context(Ours(folder, compress=coding)) for name, coding in CODINGS.items()}
        others, problems = open_peers((peer for peer in PEERS if peer in SAVING), stack)
        peers: dict[str, Peer] = {**ours, **others}
        took, failed = _peaks(peers, state, folder)
        problems |= failed
        contestants: dict[str, Callable[[], Usage]] = {
            name: partial(_bare, folder, state.num_bytes, source, at_a_time) for name, at_a_time in BARE.items()
        }
        contestants |= {name: partial(_save, peers[name], state, folder) for name in took}
        found, failed = in_turns(contestants, REPETITIONS)
    return report(state.num_bytes, found, took, problems | failed)


def _peaks(peers: Mapping[str, Peer], state: State, folder: Path) -> tuple[dict[str, int], dict[str, str]]:
    """Peak memory of the second save of each contestant, which is loaded again; and the failed contestants."""
    took: dict[str, int] = {}
    problems: dict[str, str] = {}
    want = state.digest()
    for name, peer in peers.items():
        try:
            _save(peer, state, folder)
            with memory() as peak:
                peer.save(state, folder / "checked")
            took[name] = peak.extra_bytes
            state.forget()
            peer.load(folder / "checked", state)
            peer.discard(folder / "checked")
        except Exception as error:  # a peer may raise anything
            problems[name] = problem(error)
        if state.digest() != want:
            raise ValueError(f"{name} restored a state that differs from the saved one")
    return took, problems


def _save(peer: Peer, state: State, folder: Path) -> Usage:
    with usage() as took:
        peer.save(state, folder / "saved")
    peer.discard(folder / "saved")
    return took


def _bare(folder: Path, num_bytes: int, source: mmap.mmap, at_a_time: int) -> Usage:
    with usage() as took:
        wall_s = raw_write_s(folder / "bare", num_bytes, source, at_a_time)
    (folder / "bare").unlink()
    took.wall_s = wall_s
    return took


def report(num_bytes: int, found: Found, peaks: Mapping[str, int], problems: dict[str, str]) -> Report:
    """Ratios of medians."""
    seconds = {name: median(took.wall_s for took in all_took) for name, all_took in found.items()}
    limit = min(seconds[name] for name in BARE)
    nothing = float("nan")
    raw, fast = seconds.get(RAW, nothing), seconds.get(FAST, nothing)
    goals = [
        Goal("bare write", RAW, limit / raw, LIMIT_GOAL, "at least"),
        *(Goal(peer, RAW, seconds.get(peer, nothing) / raw, RAW_GOAL, "at least") for peer in TO_BEAT),
        *(Goal(peer, FAST, seconds.get(peer, nothing) / fast, FAST_GOAL, "at least") for peer in TO_BEAT),
    ]
    return Report(
        bench="durable-disk",
        what=f"{num_bytes / 1e9:.2f} GB, committed on disk, median (quartiles) of {REPETITIONS} in turns",
        columns=("", "seconds", "GB/s", "core-s", "extra memory"),
        rows=rows(num_bytes, found, peaks),
        goals=goals,
        limit=limit,
        peers={name: value for name, value in seconds.items() if name in PEERS},
        problems=problems,
        state_bytes=num_bytes,
        facts={f"{name}, seconds": seconds[name] for name in CODINGS if name in seconds}
        | {f"{name}, core-s": median(took.core_s for took in all_took) for name, all_took in found.items()},
    )


def rows(num_bytes: int, found: Found, peaks: Mapping[str, int]) -> list[Sequence[str]]:
    """Limits, ours, peers: seconds, speed, processor seconds, memory."""
    table: list[Sequence[str]] = []
    for name, all_took in found.items():
        spread = Spread.of([took.wall_s for took in all_took])
        core_s = median(took.core_s for took in all_took)
        peak = f"{peaks[name] / 1e6:.0f} MB" if name in peaks else ""
        table.append((name, str(spread), f"{num_bytes / spread.median / 1e9:.2f}", f"{core_s:.2f}", peak))
    return table
