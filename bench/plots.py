"""Stored size against time, for all libraries that save whole states: python -m bench.plots [--quick].

`python -m bench.plots growth` draws how costs grow, from the verdicts of the simulations in bench/results, and
`python -m bench.plots families` the seconds of the limit, the peers and ours, from the other verdicts.

Each saves and restores the same state in turns: the time until a save is durable, and until everything is back in the
live tensors, read from the page cache. Draws sizes-and-times.svg under bench/results, and writes the numbers next to
it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from bench.measuring import REPETITIONS, in_turns, memcpy_s, raw_write_s, seconds, touched
from bench.ours import Ours
from bench.peers import SAVING, open_peers
from bench.peers.peer import Peer
from bench.state import State, trained, wanted_bytes

RESULTS = Path(__file__).parent / "results"
OURS = ("off", "fast", "max")
"""Values of compress=."""
PANELS = {"durable": "save: seconds per GB until durable", "restore": "restore: seconds per GB, from the page cache"}
GROWTH: dict[str, tuple[str, dict[str, float | None]]] = {
    "scale": ("ranks", {"commit s": 3.0, "requests per rank": 4.0, "plan s": 1.0, "rank 0 memory bytes": None}),
    "scale-daemon": (
        "checkpoints",
        {"first scan s": None, "refresh s": None, "retention plan of a run s": None, "memory bytes": None},
    ),
}
"""By simulation: what its costs grow with, and the costs that are drawn, with their goals."""
FAMILIES = {
    "stall": "save: seconds until training goes on",
    "slowdown": "save: seconds that training loses per GB",
    "durable-disk": "save: seconds until durable on a disk",
    "durable-s3": "save: seconds until durable on S3",
    "restore-warm": "restore: seconds, from the page cache",
    "restore-cold": "restore: seconds, from a disk",
    "restore-s3": "restore: seconds, from S3",
    "restart": "restart: seconds until the first step",
}
"""The benchmarks whose seconds are drawn, with their titles."""
OUR_COLOR, PEER_COLOR, LIMIT_COLOR, INK = "#1f6feb", "#8a8f98", "#c2410c", "#24292f"


def measure(quick: bool) -> dict[str, Any]:
    """For each library: stored over raw bytes, seconds per GB to save and to restore; the limits; missing libraries."""
    state = trained("fp32", wanted_bytes(quick))
    gigabytes = state.num_bytes / 1e9
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        ours: dict[str, Peer] = {
            f"ckptd, {compress}": stack.enter_context(Ours(Path(name), compress=compress)) for compress in OURS
        }
        peers, problems = open_peers(SAVING, stack)
        folders = (Path(name, str(number)) for number in count())
        contestants = {label: partial(_once, peer, state, folders) for label, peer in (ours | peers).items()}
        in_turns(contestants, 1)  # memory and processes are made
        found, more = in_turns(contestants, REPETITIONS)
        limits = _limits(Path(name, "raw"), state.num_bytes)
    return {
        "state_bytes": state.num_bytes,
        "points": {
            label: {
                "stored": median(each[0] for each in times) / state.num_bytes,
                "durable": median(each[1] for each in times) / gigabytes,
                "restore": median(each[2] for each in times) / gigabytes,
            }
            for label, times in found.items()
        },
        "limits": {panel: limit / gigabytes for panel, limit in limits.items()},
        "problems": problems | more,
    }


def _once(peer: Peer, state: State, folders: Iterator[Path]) -> tuple[float, float, float]:
    """Stored bytes, and seconds to save and to restore."""
    folder = next(folders)
    durable_s = seconds(lambda: peer.save(state, folder))
    stored = peer.stored_bytes(folder)
    peer.load(folder, state)  # some write past the page cache; now it has everything
    restore_s = seconds(lambda: peer.load(folder, state))
    peer.discard(folder)
    return stored, durable_s, restore_s


def _limits(path: Path, num_bytes: int) -> dict[str, float]:
    """A bare write and a bare copy of as many bytes."""
    source, target = touched(num_bytes), touched(num_bytes)
    return {
        "durable": median(raw_write_s(path, num_bytes, source) for _ in range(REPETITIONS)),
        "restore": median(memcpy_s(num_bytes, target, source) for _ in range(REPETITIONS)),
    }


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Two panels, one dot for each. Raises ImportError without matplotlib."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "ckptd"  # the same numbers give the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(12, 5.5), layout="constrained")
    for axis, (panel, title) in zip(axes, PANELS.items(), strict=True):
        _draw_panel(axis, found, panel, title)
    figure.suptitle(
        f"{found['state_bytes'] / 1e9:.2f} GB of a trained model with AdamW; lower left is better", color=INK
    )
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _draw_panel(axis: Any, found: Mapping[str, Any], panel: str, title: str) -> None:
    limit = found["limits"][panel]
    axis.set_yscale("log", subs=(2, 3, 5, 7))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("{x:g}")
    axis.axhline(limit, color=LIMIT_COLOR, linestyle="--", linewidth=1)
    points = sorted(found["points"].items(), key=lambda item: item[1][panel])
    heights = _apart([point[panel] for _, point in points])
    for (label, point), height in zip(points, heights, strict=True):
        color = OUR_COLOR if label.startswith("ckptd") else PEER_COLOR
        axis.scatter(point["stored"], point[panel], color=color, s=45, zorder=3)
        axis.annotate(
            label, (point["stored"], point[panel]), (1.02, height), textcoords=axis.get_yaxis_transform(), color=color,
            fontsize=9, va="center", arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.4},
        )  # fmt: skip
    bare = "bare write and fsync" if panel == "durable" else "memcpy"
    axis.text(0.01, limit, bare, color=LIMIT_COLOR, transform=axis.get_yaxis_transform(), va="bottom", fontsize=9)
    axis.set_title(title, color=INK, fontsize=11)
    axis.set_xlabel("stored / raw bytes", color=INK)
    axis.grid(True, which="major", color="#e5e7eb", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)


def _apart(heights: Sequence[float], factor: float = 1.13) -> list[float]:
    """Rising heights on a logarithmic axis, moved up where labels would touch."""
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] * factor) if placed else height)
    return placed


def draw_growth(verdict: Path) -> None:
    """The growing figure, against the number that it grows with, next to the stored verdict of a simulation.

    Facts are named `cost, number` or `cost, number how`; each `how` is a line. Raises ImportError without matplotlib.
    """
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "ckptd"  # the same numbers give the same file
    from matplotlib import pyplot

    of, panels = GROWTH[verdict.stem]
    lines: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for fact, value in json.loads(verdict.read_text())["facts"].items():
        name, _, rest = fact.rpartition(", ")
        number, _, how = rest.partition(" ")
        lines[name][how][int(number)] = value
    figure, axes = pyplot.subplots(1, len(panels), figsize=(14, 3.5), layout="constrained")
    for axis, (name, goal) in zip(axes, panels.items(), strict=True):
        for color, (how, found) in zip((OUR_COLOR, PEER_COLOR), lines[name].items(), strict=False):
            axis.plot(list(found), list(found.values()), color=color, marker="o", label=how or of)
        if goal is not None:
            axis.axhline(goal, color=LIMIT_COLOR, linestyle="--", linewidth=1)
        if len(lines[name]) > 1:
            axis.legend(frameon=False)
        axis.set_xscale("log", base=2 if of == "ranks" else 10)
        axis.set_yscale("log")  # what grows linearly is a straight line
        axis.set_title(name, color=INK, fontsize=11)
        axis.set_xlabel(of, color=INK)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(verdict.with_suffix(".svg"), metadata={"Date": None})
    pyplot.close(figure)


def draw_families(folder: Path) -> None:
    """A panel per benchmark: seconds of the peers and ours, and the limit. From the verdicts in a folder, next to them.

    Raises ImportError without matplotlib.
    """
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "ckptd"  # the same numbers give the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 4, figsize=(17, 6.5), layout="constrained")
    for axis, (bench, title) in zip(axes.flat, FAMILIES.items(), strict=True):
        verdict = json.loads((folder / f"{bench}.json").read_text())
        took = sorted(seconds_of(verdict).items(), key=lambda item: -item[1])
        for row, (name, value) in enumerate(took):
            color = OUR_COLOR if name.startswith("ckptd") else PEER_COLOR
            axis.plot([axis_begin(verdict), value], [row, row], color=color, linewidth=1)
            axis.scatter(value, row, color=color, s=30, zorder=3)
            axis.annotate(f"{value:.3g}", (value, row), (6, 0), textcoords="offset points", fontsize=8, va="center")
        if verdict["limit"]:
            axis.axvline(verdict["limit"], color=LIMIT_COLOR, linestyle="--", linewidth=1)
        axis.set_xscale("log")
        axis.margins(x=0.2)
        axis.xaxis.set_visible(False)  # the values are beside their dots
        axis.set_yticks(range(len(took)), [name for name, _ in took], fontsize=8)
        axis.set_title(title, color=INK, fontsize=10)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
    figure.suptitle("ckptd (blue), peers (grey) and the limit (dashed), logarithmic; left is better", color=INK)
    figure.savefig(folder / "families.svg", metadata={"Date": None})
    pyplot.close(figure)


def axis_begin(verdict: Mapping[str, Any]) -> float:
    """Where the lines of a panel begin: a little before the least of its numbers."""
    return 0.8 * float(min(filter(None, (verdict["limit"], *seconds_of(verdict).values()))))


def seconds_of(verdict: Mapping[str, Any]) -> dict[str, float]:
    """Seconds that contestants took for the same work, by name, in a verdict."""
    names = {name: name.removesuffix(", seconds") for name in verdict["facts"]}
    ours = {short: verdict["facts"][name] for name, short in names.items() if short.startswith("ckptd")}
    ours |= {"ckptd": verdict["facts"]["seconds"]} if "seconds" in verdict["facts"] else {}
    left_out = ("core-s", "step ratio", "first", "prefetch")
    found = {name: value for name, value in (verdict["peers"] | ours).items() if value is not None}
    return {name: value for name, value in found.items() if not name.endswith(left_out)}


def main() -> None:
    """Measure, keep the numbers, draw; or draw what has been measured."""
    if "families" in sys.argv[1:]:
        draw_families(RESULTS / "full")
        return
    if "growth" in sys.argv[1:]:
        for verdict in (RESULTS / run / f"{name}.json" for run in ("full", "quick") for name in GROWTH):
            draw_growth(verdict)
        return
    quick = "--quick" in sys.argv[1:]
    folder = RESULTS / ("quick" if quick else "full")
    folder.mkdir(parents=True, exist_ok=True)
    found = measure(quick)
    (folder / "sizes-and-times.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))
    draw(found, folder / "sizes-and-times.svg")


if __name__ == "__main__":
    main()
