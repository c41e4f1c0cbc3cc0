"""All benchmarks, one after the other, each in a process of its own; the table of their verdicts in bench/README.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from bench import machine
from ckptstore import human

HERE = Path(__file__).parent
RESULTS = HERE / "results"
README = HERE / "README.md"
BEGIN = "<!-- verdicts: written by python -m bench -->"
END = "<!-- end of verdicts -->"
TIMEOUT_S = {"full": 1200, "again": 1200, "busy": 2400, "quick": 300}
"""Seconds after which a benchmark counts as hung, by run. Each run has a folder in bench/results: at full size, the
same once more, with a spinning process per core, and with less data."""
MOST_SHOWN = 4
"""Ratios with the same reference and limit, of which each is in the table; of more, the least and the largest."""
COLUMNS = ("full", "again", "busy")
"""Runs that are in the table, if they have verdicts."""


def run_all(benches: Sequence[str], run: str) -> bool:
    """Run them and keep their verdicts. True if one of them did not finish."""
    folder, failed = RESULTS / run, False
    folder.mkdir(parents=True, exist_ok=True)
    with _busy_cores() if run == "busy" else nullcontext():
        for bench in benches:
            path = folder / f"{bench}.json"
            began = time.monotonic()
            error = _run(["bench", bench, "--json", str(path)], run)
            print(f"--- {bench}: {error or 'ran'}, {time.monotonic() - began:.0f} s", flush=True)
            if error:
                failed = True
                path.write_text(json.dumps({"bench": bench, "error": error, "machine": machine.describe()}) + "\n")
    return failed


@contextmanager
def _busy_cores() -> Iterator[None]:
    command = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(command) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def draw_plots(run: str) -> bool:
    """Measure what is only drawn, and draw all plots. True if that failed."""
    error = _run(["bench.plots"], run) or _run(["bench.plots", "growth"], run) or _run(["bench.plots", "families"], run)
    print(f"--- plots: {error or 'drawn'}", flush=True)
    return bool(error)


def _run(arguments: Sequence[str], run: str) -> str:
    """Run a module; returns its error, or an empty text."""
    command = [sys.executable, "-m", *arguments, *(["--quick"] if run == "quick" else [])]
    try:
        with tempfile.TemporaryDirectory(prefix="ckptd-bench-") as own:  # savers note there what this host has saved
            done = subprocess.run(
                command, cwd=HERE.parent, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT_S[run],
                env={**os.environ, "TMPDIR": own},
            )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"still running after {TIMEOUT_S[run]} s"
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"it ended with status {done.returncode}"


def write_table(benches: Iterable[str], results: Path = RESULTS, readme: Path = README) -> None:
    """Write the stored verdicts into the README, between its markers."""
    kept = {run: found for run in COLUMNS if (found := _kept(benches, results / run))}
    lines = [f"| bench | ratio | goal | {' | '.join(kept)} |", "|---|---|---|" + "---|" * len(kept)]
    for bench in (bench for bench in benches if any(bench in verdicts for verdicts in kept.values())):
        lines += _lines(bench, [verdicts.get(bench) for verdicts in kept.values()])
    head, rest = readme.read_text().split(BEGIN, 1)
    tail = rest.split(END, 1)[1]
    readme.write_text("\n".join([head + BEGIN, "", *lines, "", *_notes(kept), "", END + tail]))


def _kept(benches: Iterable[str], folder: Path) -> dict[str, dict[str, Any]]:
    paths = {bench: folder / f"{bench}.json" for bench in benches}
    return {bench: json.loads(path.read_text()) for bench, path in paths.items() if path.exists()}


def _lines(bench: str, runs: Sequence[Mapping[str, Any] | None]) -> list[str]:
    """A table row for all goals with the same reference and limit; one for many that are reached or have one limit."""
    goals = {_ratio(goal): goal for verdict in runs[::-1] if verdict for goal in verdict.get("goals", [])}
    if not goals:
        return [f"| {bench} | | | {' | '.join(_cell(verdict, []) for verdict in runs)} |"]
    alike: dict[tuple[str, str, float], list[Mapping[str, Any]]] = defaultdict(list)
    for goal in goals.values():
        alike[goal["vs"], goal["direction"], goal["goal"]].append(goal)
    lines = []
    for (vs, direction, limit), group in alike.items():
        names, ratios = "; ".join(goal["name"] for goal in group), [_ratio(goal) for goal in group]
        if len(group) > MOST_SHOWN:
            names = f"{len(group)} cases"
        cells = [_cell(verdict, ratios) for verdict in runs]
        lines.append([f"{names} / {vs}", f"{direction} {limit:.3g}", *cells])
    reached = all(goal["ok"] for verdict in runs if verdict for goal in verdict.get("goals", []))
    if len(lines) > 2 and (reached or len({limit for _, limit, *_ in lines}) == 1):  # a row shows that as well
        lines = [["; ".join(column) for column in zip(*lines, strict=True)]]
    return [f"| {' | '.join([bench, *line])} |" for line in lines]


def _ratio(goal: Mapping[str, Any]) -> str:
    return f"{goal['name']} / {goal['vs']}"


def _cell(verdict: Mapping[str, Any] | None, wanted: Sequence[str]) -> str:
    """The ratios of a verdict, in the order of `wanted`; missed ones are bold."""
    if verdict is None:
        return "not run"
    if "error" in verdict:
        problem: str = verdict["error"]
        return "did not run: " + problem.replace("|", "\\|")
    found = {_ratio(goal): goal for goal in verdict["goals"]}
    if len(wanted) > MOST_SHOWN:
        measured = sorted((goal for goal in map(found.get, wanted) if goal and goal["ratio"]), key=lambda g: g["ratio"])
        return f"{_shown(measured[0])} to {_shown(measured[-1])}" if measured else "-"
    return "; ".join(_shown(found[ratio]) if ratio in found else "-" for ratio in wanted)


def _shown(goal: Mapping[str, Any]) -> str:
    ratio = "not measured" if goal["ratio"] is None else f"{goal['ratio']:.3g}"
    return ratio if goal["ok"] else f"**{ratio}**"


def _notes(kept: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """The machines, the sizes, the versions, and the peers that did not run."""
    notes = []
    for run, verdicts in kept.items():
        for name in sorted({verdict["machine"] for verdict in verdicts.values()}):
            there = [verdict for verdict in verdicts.values() if verdict["machine"] == name]
            notes.append(f"- {run.capitalize()}: {name}; {_sizes(there)}{_free(there)}.")
    all_verdicts = [verdict for verdicts in kept.values() for verdict in verdicts.values()]
    versions = {name: number for verdict in all_verdicts for name, number in verdict.get("versions", {}).items()}
    line = "Versions: " + ", ".join(f"{name} {number}" for name, number in sorted(versions.items())) + "."
    notes += ["", textwrap.fill(line, 150, break_long_words=False, break_on_hyphens=False)]
    problems = {
        f"- {peer} did not run in {verdict['bench']}: {problem}"
        for verdict in all_verdicts
        for peer, problem in verdict.get("problems", {}).items()
    }
    return [*notes, "", *sorted(problems)] if problems else notes


def _sizes(verdicts: Iterable[Mapping[str, Any]]) -> str:
    sizes = [verdict["state_bytes"] for verdict in verdicts if verdict.get("state_bytes")]
    return f"states of {human.size(min(sizes))} to {human.size(max(sizes))}" if sizes else "no states"


def _free(verdicts: Iterable[Mapping[str, Any]]) -> str:
    """The cores that other work left to the benchmarks, and the load that they began with."""
    loads = [verdict["load"] for verdict in verdicts if verdict.get("load")]
    if not loads:
        return ""
    free, before = ([load[key] for load in loads] for key in ("free_cores", "load_before"))
    return f"; {min(free):.1f} to {max(free):.1f} cores free, load before {min(before):.1f} to {max(before):.1f}"
