"""python -m bench NAME [--quick] [--json FILE]: tables, then one line of JSON with the verdict.

`python -m bench all [NAME ...] [--quick | --again | --busy]` runs these benchmarks, or every one, each in a process of
its own. It keeps the verdicts under bench/results and rewrites the table in bench/README.md. `python -m bench table`
writes the table from the stored verdicts.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import collection, machine
from bench.report import Report

BENCHES = (
    "stall",
    "slowdown",
    "durable-disk",
    "durable-s3",
    "restore-cold",
    "restore-warm",
    "restore-extras",
    "restore-s3",
    "remote-s3",
    "remote-clouds",
    "restart",
    "hosts",
    "replicas",
    "size",
    "codec",
    "references",
    "deltas",
    "memory",
    "leaves",
    "plan",
    "scale",
    "scale-daemon",
    "predict",
    "restore-estimate",
    "goodput",
    "daemon-read",
    "hub-read",
    "index",
    "integrations",
)
"""Each is a module with `measure(quick) -> Report`, imported only when it is run."""


def main() -> None:
    """Run one benchmark, or all of them, or write the table."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("name", choices=[*BENCHES, "all", "table"])
    parser.add_argument("only", nargs="*", help="with all: the benchmarks to run")
    runs = parser.add_mutually_exclusive_group()
    runs.add_argument("--quick", action="store_true", help="less data: only checks that the benchmark runs")
    runs.add_argument("--again", action="store_true", help="with all: in a column of its own, for comparison")
    runs.add_argument("--busy", action="store_true", help="with all: with a spinning process per core")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the line of JSON to a file as well")
    args = parser.parse_intermixed_args()  # names behind options too
    if args.name != "all" and (args.only or args.again or args.busy):
        parser.error("NAME ..., --again and --busy need all")
    # Savers of trainers that are killed must not disturb the next one.
    os.environ.setdefault("CKPT_RETAIN_SNAPSHOT_S", "0")
    # A checkout would be compiled in each process, unlike the installed peers.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if args.name == "all":
        run_name = next((name for name in collection.TIMEOUT_S if getattr(args, name, False)), "full")
        if unknown := set(args.only) - set(BENCHES):
            parser.error(f"no such benchmark: {', '.join(sorted(unknown))}")
        failed = collection.run_all(args.only or BENCHES, run_name)
        if not args.only and run_name in ("full", "quick"):
            failed |= collection.draw_plots(run_name)
        collection.write_table(BENCHES)
        sys.exit(failed)
    if args.name == "table":
        collection.write_table(BENCHES)
    else:
        run(args.name, args.quick, args.json)


def run(name: str, quick: bool, path: Path | None) -> None:
    """Run one, print its result, and keep the last line."""
    module = importlib.import_module("bench." + name.replace("-", "_"))
    with machine.watched() as load:
        report: Report = module.measure(quick)
    show(report)
    where = {"quick": quick, "machine": machine.describe(), "load": load, "versions": machine.versions()}
    line = json.dumps(report.verdict() | where)
    if path:
        path.write_text(line + "\n")
    print(line)


def show(report: Report) -> None:
    """For people."""
    console = Console(width=120)
    table = Table(*report.columns, title=f"{report.bench}: {report.what}", title_justify="left")
    for row in report.rows:
        table.add_row(*row)
    console.print(table)
    goals = Table("", "ratio", "goal", "")
    for goal in report.goals:
        name = f"{goal.name} / {goal.vs}" if goal.vs else goal.name
        goals.add_row(name, f"{goal.ratio:.4g}", f"{goal.direction} {goal.goal:g}", "reached" if goal.ok else "missed")
    console.print(goals)
    for peer, problem in report.problems.items():
        console.print(f"{peer} did not run: {problem}", markup=False)


if __name__ == "__main__":
    main()
