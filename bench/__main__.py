"""python -m bench NAME [--quick] [--json FILE]: a table, then one line of JSON with the verdict."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import codec, daemon_read, index, plan, stall
from bench.report import Report

BENCHES = {
    "stall": stall.measure,
    "codec": codec.measure,
    "plan": plan.measure,
    "daemon-read": daemon_read.measure,
    "index": index.measure,
}


def main() -> None:
    """Run one benchmark."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("name", choices=BENCHES)
    parser.add_argument("--quick", action="store_true", help="less data: to see that it runs, not to quote")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the line of JSON to a file as well")
    args = parser.parse_args()
    report: Report = BENCHES[args.name](args.quick)
    table = Table(*report.columns, title=f"{report.bench}: {report.what}", title_justify="left")
    for row in report.rows:
        table.add_row(*row)
    Console().print(table)
    line = json.dumps(report.verdict())
    if args.json:
        args.json.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
