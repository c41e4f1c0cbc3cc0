"""Makes the picture of `make demo` that README.md shows, from a real run: `make pictures`. It loads nothing."""

from __future__ import annotations

import io
import itertools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "assets" / "demo.svg"
_COLUMNS = 126
_FONTS = re.compile(r"@font-face \{\{.*?\}\}\s*", re.DOTALL)
"""Rich loads its font from the network; without it, the font of the reader's browser is used."""
_CURSOR = re.compile(r"\x1b\[[0-9;?]*[A-HJKhl]")
_BAR = re.compile(r"\s*(training|saving) ")


def svg_of(output: str) -> str:
    """The output of `make demo` on a terminal up to its comparison, without progress bars, as a picture. Pure."""
    lines = [_CURSOR.sub("", line).rstrip() for line in output.splitlines()]
    lines = list(itertools.takewhile(lambda line: "For orchestrators" not in line, lines))
    shown = "\n".join(line for line in lines if not _BAR.match(line))
    console = Console(record=True, width=_COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(re.sub(r"\n{3,}", "\n\n", shown).strip()))
    return console.export_svg(title="make demo", code_format=_FONTS.sub("", CONSOLE_SVG_FORMAT), unique_id="demo")


def main() -> None:
    """Run the demonstration, and make the picture."""
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(_COLUMNS)}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "examples" / "demo.py"), "--out", f"{folder}/demo"]
        output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    PICTURE.write_text(svg_of(output.replace(folder, "/tmp")))


if __name__ == "__main__":
    main()
