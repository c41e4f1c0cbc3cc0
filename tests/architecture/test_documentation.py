"""The pages keep up with the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def table_row(page: str, first: str) -> list[str] | None:
    """The cells of the row that begins with `first`."""
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[0] == first:
            return cells
    return None


def test_every_verb_of_the_makefile_is_explained() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert [verb for verb in phony[1].split() if table_row(page, f"`make {verb}`") is None] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tests_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"`(?:tests/[\w/]*/)?(test_\w+\.py)`", page.read_text())
    assert [name for name in named if not list((ROOT / "tests").rglob(name))] == []
