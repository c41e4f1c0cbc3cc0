"""All benchmarks, one after the other, each in a process of its own; the table of their verdicts in bench/README.md."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import machine
from ckptstore import human

HERE = Path(__file__).parent
RESULTS = HERE / "results"
README = HERE / "README.md"
BEGIN = "<!-- verdicts: written by python -m bench -->"
END = "<!-- end of verdicts -->"
TIMEOUT_S = {True: 300, False: 1200}
"""Time limit by --quick; a benchmark that exceeds it is considered hung."""


def run_all(benches: Sequence[str], quick: bool) -> int:
    """Run them, keep their verdicts, draw the plots, rewrite the table. 1 if one of them did not finish."""
    folder = RESULTS / _part(quick)
    folder.mkdir(parents=True, exist_ok=True)
    errors = {}
    for bench in benches:
        path = folder / f"{bench}.json"
        began = time.monotonic()
        error = _run(["bench", bench, "--json", str(path)], quick)
        print(f"--- {bench}: {error or 'ran'}, {time.monotonic() - began:.0f} s", flush=True)
        if error:
            errors[bench] = error
            path.write_text(json.dumps({"bench": bench, "error": error, "machine": machine.describe()}) + "\n")
    error = _run(["bench.plots"], quick) or _run(["bench.plots", "growth"], quick)
    print(f"--- plots: {error or 'drawn'}", flush=True)
    write_table(benches)
    return int(bool(errors or error))


def _run(arguments: Sequence[str], quick: bool) -> str:
    """Run a module; returns its error, or an empty text."""
    command = [sys.executable, "-m", *arguments, *(["--quick"] if quick else [])]
    try:
        done = subprocess.run(command, cwd=HERE.parent, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT_S[quick])
    except subprocess.TimeoutExpired:
        return f"still running after {TIMEOUT_S[quick]} s"
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"it ended with status {done.returncode}"


def _part(quick: bool) -> str:
    return "quick" if quick else "full"


def write_table(benches: Iterable[str], results: Path = RESULTS, readme: Path = README) -> None:
    """Write the stored verdicts into the README, between its markers."""
    kept = {quick: _kept(benches, results / _part(quick)) for quick in (False, True)}
    lines = ["| bench | ratio | goal | full | quick |", "|---|---|---|---|---|"]
    for bench in benches:
        lines += _lines(bench, kept[False].get(bench), kept[True].get(bench))
    head, rest = readme.read_text().split(BEGIN, 1)
    tail = rest.split(END, 1)[1]
    readme.write_text("\n".join([head + BEGIN, "", *lines, "", *_notes(kept), "", END + tail]))


def _kept(benches: Iterable[str], folder: Path) -> dict[str, dict[str, Any]]:
    paths = {bench: folder / f"{bench}.json" for bench in benches}
    return {bench: json.loads(path.read_text()) for bench, path in paths.items() if path.exists()}


def _lines(bench: str, full: Mapping[str, Any] | None, quick: Mapping[str, Any] | None) -> list[str]:
    """One table row for all goals with the same reference and limit."""
    goals = {_ratio(goal): goal for verdict in (quick, full) if verdict for goal in verdict.get("goals", [])}
    if not goals:
        return [f"| {bench} | | | {_cell(full, [])} | {_cell(quick, [])} |"]
    alike: dict[tuple[str, str, float], list[Mapping[str, Any]]] = defaultdict(list)
    for goal in goals.values():
        alike[goal["vs"], goal["direction"], goal["goal"]].append(goal)
    lines = []
    for (vs, direction, limit), group in alike.items():
        names, ratios = "; ".join(goal["name"] for goal in group), [_ratio(goal) for goal in group]
        cells = f"{_cell(full, ratios)} | {_cell(quick, ratios)}"
        lines.append(f"| {bench} | {names} / {vs} | {direction} {limit:.3g} | {cells} |")
    return lines


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
    return "; ".join(_shown(found[ratio]) if ratio in found else "-" for ratio in wanted)


def _shown(goal: Mapping[str, Any]) -> str:
    ratio = "not measured" if goal["ratio"] is None else f"{goal['ratio']:.3g}"
    return ratio if goal["ok"] else f"**{ratio}**"


def _notes(kept: Mapping[bool, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """The machines, the sizes, the versions, and the peers that did not run."""
    notes = []
    for quick, verdicts in kept.items():
        for name in sorted({verdict["machine"] for verdict in verdicts.values()}):
            there = [verdict for verdict in verdicts.values() if verdict["machine"] == name]
            notes.append(f"- {'Quick' if quick else 'Full'}: {name}; {_sizes(there)}{_free(there)}.")
    all_verdicts = [verdict for verdicts in kept.values() for verdict in verdicts.values()]
    versions = {name: number for verdict in all_verdicts for name, number in verdict.get("versions", {}).items()}
    line = "Versions: " + ", ".join(f"{name} {number}" for name, number in sorted(versions.items())) + "."
    notes += ["", textwrap.fill(line, 150, break_long_words=False, break_on_hyphens=False), ""]
    problems = {
        f"- {peer} did not run in {verdict['bench']}: {problem}"
        for verdict in all_verdicts
        for peer, problem in verdict.get("problems", {}).items()
    }
    return notes + sorted(problems)


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
