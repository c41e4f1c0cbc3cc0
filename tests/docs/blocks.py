"""Code on the pages of docs/, the README and in notebooks, as blocks that tests run or check.

Blocks are fenced, or indented by four spaces, which means shell. A comment above a block changes what happens to it:

    <!-- not run: REASON -->   it is only parsed
    <!-- output -->            it is what the blocks since the last output have printed; "..." stands for anything
    <!-- setup ... -->         Python that readers need not see; the lines of the comment are the block

`title="train.py"` after the language of a fence means a file that later blocks run.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(
    r"^<!-- setup\n(?P<setup>.*?)^-->$"
    r"|(?:^<!-- (?P<mark>not run: [^\n]+?|output) -->\n\n?)?"
    r"(?:^(?P<fence>```+)(?P<language>\w*)(?: title=\"(?P<title>[^\"]+)\")?[^\n]*\n(?P<fenced>.*?)^(?P=fence)$"
    r"|(?<=\n\n)(?P<indented>(?:^    [^\n]*\n(?:\n(?=    ))?)+))",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int
    title: str = ""
    not_run: str = ""
    """Why it is not run."""
    is_output: bool = False

    @property
    def is_file(self) -> bool:
        """Whether it is a file, for later blocks."""
        return bool(self.title) and not self.is_output


def pages() -> list[Path]:
    """Every page with code that readers may copy."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").glob("*.ipynb"))]
    return [page for page in found if "decisions" not in page.parts and blocks(page)]


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, in their order."""
    if page.suffix == ".ipynb":
        return list(_cells(page))
    text = page.read_text()
    found = [match for match in _BLOCK.finditer(text) if not (match["indented"] and _in_list(text[: match.start()]))]
    return [_block(match, text.count("\n", 0, match.start()) + 1) for match in found]


def _in_list(before: str) -> bool:
    """Whether the paragraph before an indented text is an item of a list."""
    return re.match(r"[-*+] |\d+\. ", before.rstrip().rpartition("\n\n")[2]) is not None


def _block(match: re.Match[str], line: int) -> Block:
    if match["setup"] is not None:
        return Block("python", match["setup"], line)
    mark = match["mark"] or ""
    language, text = match["language"], match["fenced"]
    if text is None:
        language, text = "sh", re.sub(r"^    ", "", match["indented"], flags=re.MULTILINE)
    reason = mark.removeprefix("not run: ") if mark.startswith("not run") else ""
    return Block(language, text, line, match["title"] or "", reason, mark == "output")


def _cells(notebook: Path) -> list[Block]:
    """Code of the cells, and the text that they have printed."""
    found = []
    for number, cell in enumerate(json.loads(notebook.read_text())["cells"], 1):
        if cell["cell_type"] == "code":
            found.append(Block("python", "".join(cell["source"]), number))
            printed = "".join("".join(output.get("text", ())) for output in cell["outputs"])
            found += [Block("text", printed, number, is_output=True)] * bool(printed)
    return found
