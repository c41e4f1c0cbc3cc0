"""All benchmarks, one after the other, each in a process of its own; the table of their verdicts in bench/README.md."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptstore import human

HERE = Path(__file__).parent
RESULTS = HERE / "results"
README = HERE / "README.md"
BEGIN = "<!-- results: written by `python -m bench all` -->"
END = "<!-- end of results -->"
TIMEOUT_S = {True: 300, False: 1200}
"""By --quick. A benchmark that takes longer hangs."""


def run_all(benches: Sequence[str], quick: bool) -> int:
    """Run them, keep their verdicts, write the table anew. 1 if one of them did not run to its end."""
    folder = _folder(quick)
    folder.mkdir(parents=True, exist_ok=True)
    machine = describe_machine()
    failed = False
    for bench in benches:
        print(f"--- {bench}", flush=True)
        verdict = _run(bench, quick)
        failed = failed or "error" in verdict
        (folder / f"{bench}.json").write_text(json.dumps(verdict | {"machine": machine}, indent=1) + "\n")
    write_table(benches)
    return int(failed)


def _folder(quick: bool) -> Path:
    return RESULTS / ("quick" if quick else "full")


def _run(bench: str, quick: bool) -> dict[str, Any]:
    """Its verdict; {"bench", "error"} if it has none."""
    command = [sys.executable, "-m", "bench", bench, *(["--quick"] if quick else [])]
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=HERE.parent, capture_output=True, text=True,
            timeout=TIMEOUT_S[quick], check=True,
        )  # fmt: skip
        print(done.stdout, end="", flush=True)
        verdict: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        verdict = {"bench": bench, "error": _last_line(error.stderr), "quick": quick}
    except subprocess.TimeoutExpired:
        verdict = {"bench": bench, "error": f"still running after {TIMEOUT_S[quick]} s", "quick": quick}
    if "error" in verdict:
        print(f"{bench} did not run: {verdict['error']}", flush=True)
    return verdict | {"wall_s": round(time.monotonic() - began, 1)}


def _last_line(text: str) -> str:
    """Of a traceback: what was raised."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no output")


def describe_machine() -> str:
    """Processor, cores, memory, versions."""
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0))
    return (
        f"{cores} cores {models[0] if models else platform.machine()}, {memory / 2**30:.0f} GiB, "
        f"Linux {platform.release()}, Python {platform.python_version()}, torch {torch.__version__}"
    )


def write_table(benches: Sequence[str]) -> None:
    """Put the verdicts that are kept into the README, between its markers."""
    verdicts = {quick: _kept(benches, quick) for quick in (False, True)}
    lines = ["| bench | ratio | goal | full | quick |", "|---|---|---|---|---|"]
    for bench in benches:
        lines += _lines(bench, verdicts[False].get(bench), verdicts[True].get(bench))
    notes = _notes(verdicts)
    text = README.read_text()
    head, rest = text.split(BEGIN, 1)
    tail = rest.split(END, 1)[1]
    README.write_text("\n".join([head + BEGIN, "", *lines, "", *notes, "", END + tail]))


def _kept(benches: Sequence[str], quick: bool) -> dict[str, dict[str, Any]]:
    paths = {bench: _folder(quick) / f"{bench}.json" for bench in benches}
    return {bench: json.loads(path.read_text()) for bench, path in paths.items() if path.exists()}


def _lines(bench: str, full: Mapping[str, Any] | None, quick: Mapping[str, Any] | None) -> list[str]:
    """One for each goal."""
    goals = {goal["name"]: goal for verdict in (quick, full) if verdict for goal in verdict.get("goals", [])}
    if not goals:
        return [f"| {bench} | | | {_cell(full, '')} | {_cell(quick, '')} |"]
    return [
        f"| {bench} | {name} / {goal['vs']} | {goal['direction']} {goal['goal']:g} "
        f"| {_cell(full, name)} | {_cell(quick, name)} |"
        for name, goal in goals.items()
    ]


def _cell(verdict: Mapping[str, Any] | None, name: str) -> str:
    if verdict is None:
        return "not run"
    if "error" in verdict:
        problem: str = verdict["error"]
        return "did not run: " + problem.replace("|", "\\|")
    for goal in verdict["goals"]:
        if goal["name"] == name:
            ratio = "not measured" if goal["ratio"] is None else f"{goal['ratio']:.3g}"
            return ratio if goal["ok"] else f"**{ratio}**, missed"
    return ""


def _notes(verdicts: Mapping[bool, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """The machines, the sizes, and the peers that did not run."""
    notes = [
        f"{'quick' if quick else 'full'}: {machine}; {_sizes(kept)}.  "
        for quick, kept in verdicts.items()
        for machine in sorted({verdict["machine"] for verdict in kept.values()})
    ]
    problems = {
        (peer, problem.replace("\n", " "))
        for kept in verdicts.values()
        for verdict in kept.values()
        for peer, problem in verdict.get("problems", {}).items()
    }
    return notes + [f"- {peer} did not run: {problem}" for peer, problem in sorted(problems)]


def _sizes(kept: Mapping[str, Mapping[str, Any]]) -> str:
    sizes = [verdict["state_bytes"] for verdict in kept.values() if verdict.get("state_bytes")]
    return f"states of {human.size(min(sizes))} to {human.size(max(sizes))}" if sizes else "no states"
