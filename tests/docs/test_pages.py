"""What the pages say can be done: every block is run in its order, or parsed if the page says why it is not run."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
import subprocess
import textwrap
import tomllib
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_validate import validate  # type: ignore[attr-defined]

import ckpt
from tests.docs.blocks import ROOT, Block, blocks, pages
from tests.docs.reader import Reader
from tests.support.command_line import check_command
from tests.support.forking import TRAINER, run

PAGES = {str(page.relative_to(ROOT)): page for page in pages()}
_ULID = re.compile(r"\.[0-9A-Z]{26}\b")
_LOSS = re.compile(r"loss \d[\d.e+-]*")
"""Other processors round in another way. On one machine, a step that is done again has the same loss."""
_STEP = re.compile(r"step +(\d+)  (loss \d[\d.e+-]*)")
_RUN = ("python", "sh")


def _runs(page: Path) -> list[Block]:
    return [block for block in blocks(page) if not block.not_run and (block.language in _RUN or block.is_output)]


@pytest.mark.parametrize("page", [name for name, page in PAGES.items() if _runs(page)])
def test_the_page_can_be_followed(page: str, tmp_path: Path) -> None:
    printed, everything = "", ""
    with Reader(tmp_path) as reader:
        for block in _runs(PAGES[page]):
            if block.is_output:
                assert _alike(printed, block.text), f"{page}:{block.line} is not what is printed:\n{printed}"
                printed = ""
            else:
                did = reader.do(block, f"{page}:{block.line}")
                printed, everything = printed + did, everything + did
    losses = dict(_STEP.findall(everything))
    assert [(step, loss) for step, loss in _STEP.findall(everything) if losses[step] != loss] == []


def _alike(printed: str, shown: str) -> bool:
    """Whether the text is the one shown, up to ids of attempts and losses. "..." stands for anything."""
    parts = [re.escape(_LOSS.sub("loss #", _ULID.sub("", part))) for part in shown.strip().split("...")]
    found = _LOSS.sub("loss #", _ULID.sub("", printed)).strip()
    return re.fullmatch(".*?".join(parts), found, re.DOTALL) is not None


@pytest.mark.parametrize("page", PAGES)
def test_every_block_has_a_language_and_can_be_parsed(page: str) -> None:
    for block in blocks(PAGES[page]):
        if not block.is_output:
            assert block.language in _PARSERS, f"{page}:{block.line}: name its language"
            try:
                _PARSERS[block.language](block.text)
            except Exception as error:
                raise AssertionError(f"{page}:{block.line}") from error


_CHANGES = [
    (f"{name}:{block.line}", block.text)
    for name, page in PAGES.items()
    for block in blocks(page)
    if block.language == "diff"
]


@pytest.mark.parametrize(("place", "text"), _CHANGES, ids=[place for place, _ in _CHANGES])
def test_a_script_needs_at_most_three_changed_lines(place: str, text: str) -> None:
    assert 1 <= changed_lines(text) <= 3
    added = [line[1:] for line in text.splitlines() if line.startswith("+")]
    assert [line for line in added if ";" in line.partition("#")[0]] == []


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("+a\n+b\n c\n+d\n", 3), ("-a\n+b\n", 1), ("-a\n+b\n+c\n", 2), ("-a\n b\n+c\n", 2), ("-a\n-b\n+c\n", 2),
        (" a\n", 0),
    ],
)  # fmt: skip
def test_a_line_that_takes_the_place_of_another_is_one_change(text: str, number: int) -> None:
    assert changed_lines(text) == number


def changed_lines(text: str) -> int:
    """Of each place that is changed, the lines removed or the lines added, if these are more."""
    places = [list(lines) for changes, lines in groupby(text.splitlines(), lambda line: line[:1] in "+-") if changes]
    return sum(max(sum(line[0] == sign for line in lines) for sign in "+-") for lines in places)


def _parse_python(text: str) -> None:
    """The names of this project that it uses exist."""
    for node in ast.walk(ast.parse(textwrap.dedent(text))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ckpt":
            assert hasattr(ckpt, node.attr) or importlib.util.find_spec(f"ckpt.{node.attr}"), node.attr
        if (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").startswith("ckpt")
            and "integrations" not in (node.module or "")
        ):
            found = importlib.import_module(node.module or "")
            assert [name.name for name in node.names if not hasattr(found, name.name)] == []


def _parse_diff(text: str) -> None:
    """The changed program is Python. Lines of one place in another block may be missing."""
    lines = [line[1:] for line in text.splitlines() if not line.startswith("-")]
    _parse_python("\n".join(lines))


def _parse_shell(text: str) -> None:
    """It is a script, and its commands of this project have the options that they are given."""
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        match = re.match(r"^(?:\$ )?(ckptctl|ckptd) ([^|>&#]*)", line)
        if match and "..." not in match[2]:
            check_command([match[1], *(word for word in shlex.split(match[2]) if word != "--help")])


def _parse_console(text: str) -> None:
    """Commands begin with "$ "; what they print is compared by tests of the page."""
    _parse_shell("\n".join(line[2:] for line in text.splitlines() if line.startswith("$ ")))


def _parse_yaml(text: str) -> None:
    for document in yaml.safe_load_all(text):
        if "apiVersion" in document:
            validate(document, "1.31", strict=True)


_PARSERS: dict[str, Any] = {
    "python": _parse_python, "diff": _parse_diff, "sh": _parse_shell, "console": _parse_console, "yaml": _parse_yaml,
    "toml": tomllib.loads, "json": json.loads, "text": str, "": str,
}  # fmt: skip


def test_the_losses_of_the_readme_do_not_depend_on_a_kill(tmp_path: Path) -> None:
    """Its block is killed at step 130, and started again."""
    code = next(block.text for block in blocks(ROOT / "README.md") if block.language == "python")
    saving = "    if step % 50 == 0:\n"
    killed = "    if step == 130 and sys.argv[1:]:\n        os.kill(os.getpid(), 9)\n"
    code = "import os, sys\n" + code.replace(
        saving, f"    print(step, loss.item().hex(), flush=True)\n{killed}{saving}"
    )
    code = code.replace("        print(step, loss.item())\n", "")

    def losses(store: str, *arguments: str) -> dict[str, str]:
        (tmp_path / "train.py").write_text(code.replace("/tmp/ckpts", str(tmp_path / store)))
        _, printed, _ = run(TRAINER, "tests.docs.program", [str(tmp_path), "train.py", *arguments])
        return dict(line.split() for line in printed.splitlines())

    whole, before, after = losses("whole"), losses("killed", "130"), losses("killed")
    assert (len(whole), len(before)) == (200, 131)
    assert after
    assert {**before, **after} == whole
