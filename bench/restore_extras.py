"""Restores of tensors that belong to no module, from files in the page cache, against torch.load of the same bytes.

On 1, 2 and 4 ranks. Each rank has extras of its own, or all ranks have the same shared values; they are restored into
the tensors that are given, or into new ones. torch.load makes new ones too, on every rank. The first save is apart, and
so is the first restore of a process: each way has processes of its own for it, since the first to touch memory pays
for it.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from bench.extras_rank import LOAD, WAYS, first_restore
from bench.measuring import REPETITIONS, Spread, meeting_place, output_of_ranks, rotated
from bench.report import Goal, Report
from bench.state import wanted_bytes

WORLDS = (1, 2, 4)
GOAL, FIRST_SAVE_GOAL = 1.0, 1.5
FIRST_REPETITIONS = 3
_TIMEOUT_S = 900.0
Measured = dict[str, dict[str, list[float]]]
"""By contestant, then wall_s (until the last rank is done), core_s (of all ranks), first_s (wall_s of the first)."""


def measure(quick: bool) -> Report:
    """All ranks together hold the bytes, so that more ranks do not need more memory; shared values are on each."""
    total = wanted_bytes(quick)
    found = {world: run_ranks(world, total // world) for world in WORLDS}
    rows: list[tuple[str, ...]] = []
    goals: list[Goal] = []
    facts: dict[str, float] = {}
    for world, results in found.items():
        load, first_load = (Spread.of(results[LOAD][which]).median for which in ("wall_s", "first_s"))
        for name in (*WAYS, LOAD):
            wall, core = (Spread.of(results[name][which]) for which in ("wall_s", "core_s"))
            first = Spread.of(results[name]["first_s"])
            rows.append((f"{world}", name, str(wall), f"{core.median:.2f}", str(first)))
            facts |= {f"{name}, {world}, {which}": Spread.of(results[name][which]).median for which in results[name]}
        for name in WAYS:
            ratio = Spread.of(results[name]["wall_s"]).median / load
            first_ratio = Spread.of(results[name]["first_s"]).median / first_load
            goals.append(Goal(f"{name}, {_ranks(world)}", LOAD, ratio, GOAL, "at most"))
            goals.append(Goal(f"{name}, {_ranks(world)}", f"first {LOAD}", first_ratio, GOAL, "at most"))
        stalls = results["stall"]["wall_s"]
        later = Spread.of(stalls[1:]).median
        rows.append((f"{world}", "stall of a save", f"{later:.3g}", "", f"{stalls[0]:.3g}"))
        goals.append(Goal(f"stall, {_ranks(world)}", "later saves", stalls[0] / later, FIRST_SAVE_GOAL, "at most"))
    return Report(
        bench="restore-extras",
        what=f"{total / 1e9:.2f} GB in all ranks together, in the page cache, {REPETITIONS} repetitions in turns",
        columns=("ranks", "", "seconds", "core-s", "the first"),
        rows=rows,
        goals=goals,
        peers={
            f"{LOAD}, {_ranks(world)}": Spread.of(results[LOAD]["wall_s"]).median for world, results in found.items()
        },
        state_bytes=total,
        facts=facts,
    )


def run_ranks(world: int, num_bytes: int) -> Measured:
    """The measurements of a world whose ranks hold this many bytes each."""
    names = (*WAYS, LOAD)
    with tempfile.TemporaryDirectory() as folder:
        found: Measured = output_of_ranks("bench.extras_rank", world, [folder, str(num_bytes)], _TIMEOUT_S)
        _first(Path(folder), num_bytes, LOAD, world)  # warms up: later ones reuse the pages that it frees
        for repetition in range(FIRST_REPETITIONS):
            for name in rotated(names, repetition):
                found[name].setdefault("first_s", []).append(_first(Path(folder), num_bytes, name, world))
    return found


def _first(folder: Path, num_bytes: int, name: str, world: int) -> float:
    """Wall seconds until the last of new processes has restored."""
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload(["bench.extras_rank"])
    with meeting_place(world) as environment, ProcessPoolExecutor(world, forking) as pool:
        return max(pool.map(partial(first_restore, folder, num_bytes, name, environment), range(world)))


def _ranks(world: int) -> str:
    return "1 rank" if world == 1 else f"{world} ranks"
