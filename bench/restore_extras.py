"""Restores of tensors that belong to no module, from files in the page cache, against torch.load of the same bytes.

On 1, 2 and 4 ranks. Each rank has extras of its own, or all ranks have the same shared values; they are restored into
the tensors that are given, or into new ones. torch.load makes new ones too, on every rank. The first save and the first
restore of each way are apart.
"""

from __future__ import annotations

from bench.measuring import REPETITIONS, Spread, output_of_ranks
from bench.report import Goal, Report
from bench.state import wanted_bytes

WORLDS = (1, 2, 4)
GOAL, FIRST_SAVE_GOAL = 1.0, 1.5
LOAD = "torch.load"
WAYS = ("own, in place", "own, new", "shared, in place", "shared, new")
_TIMEOUT_S = 900.0
Measured = dict[str, dict[str, list[float]]]
"""By contestant, then wall_s (until the last rank is done), core_s (of all ranks); first_s is its first wall_s."""


def measure(quick: bool) -> Report:
    """All ranks together hold the bytes, so that more ranks do not need more memory; shared values are on each."""
    total = wanted_bytes(quick)
    found = {world: run_ranks(world, total // world) for world in WORLDS}
    rows: list[tuple[str, ...]] = []
    goals: list[Goal] = []
    facts: dict[str, float] = {}
    for world, results in found.items():
        load = Spread.of(results[LOAD]["wall_s"]).median
        for name in (*WAYS, LOAD):
            wall, core = (Spread.of(results[name][which]) for which in ("wall_s", "core_s"))
            first = results[name]["first_s"][0]
            rows.append((f"{world}", name, str(wall), f"{core.median:.2f}", f"{first:.3g}"))
            facts |= {f"{name}, {world}, {which}": Spread.of(results[name][which]).median for which in results[name]}
        for name in WAYS:
            ratio = Spread.of(results[name]["wall_s"]).median / load
            first = results[name]["first_s"][0] / results[LOAD]["first_s"][0]
            goals.append(Goal(f"{name}, {_ranks(world)}", LOAD, ratio, GOAL, "at most"))
            goals.append(Goal(f"{name}, {_ranks(world)}", f"first {LOAD}", first, GOAL, "at most"))
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
    """The output of rank 0 of a world whose ranks hold this many bytes each."""
    found: Measured = output_of_ranks(
        "bench.extras_rank", world, lambda folder: [str(folder), str(num_bytes)], _TIMEOUT_S
    )
    return found


def _ranks(world: int) -> str:
    return "1 rank" if world == 1 else f"{world} ranks"
