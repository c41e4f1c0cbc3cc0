from __future__ import annotations

import json
import re
from pathlib import Path

from docsite.demo_picture import svg_of

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


def test_links_lead_somewhere_and_tests_that_are_named_exist() -> None:
    missing = []
    for page in PAGES:
        text, name = page.read_text(), page.relative_to(ROOT)
        links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
        missing += [f"{name}: {link}" for link in links if not (page.parent / link).exists()]
        tests = re.findall(r"`(?:tests/[\w/]*/)?(test_\w+\.py)`", text)
        missing += [f"{name}: {test}" for test in tests if not list((ROOT / "tests").rglob(test))]
    assert missing == []


PAGE = (ROOT / "README.md").read_text()


def test_it_has_at_most_90_lines() -> None:
    assert len(PAGE.splitlines()) <= 90


def test_its_figures_are_those_of_the_full_benchmarks() -> None:
    def ratio(bench: str, name: str, vs: str) -> float:
        goals = json.loads((ROOT / f"bench/results/full/{bench}.json").read_text())["goals"]
        (found,) = [goal["ratio"] for goal in goals if (goal["name"], goal["vs"]) == (name, vs)]
        return float(found)

    text = " ".join(PAGE.split())
    assert f"{ratio('durable-disk', 'torch.save', 'ckptd, raw'):.1f} times as fast as `torch.save` with fsync" in text
    assert f"{ratio('durable-disk', 'dcp', 'ckptd, raw'):.1f} times as fast as torch's DCP" in text
    assert "a restore takes a quarter of DCP's time" in text
    assert 1 / ratio("restore-warm", "dcp", "ckptd, raw") < 0.275


def test_its_pictures_are_there_and_load_nothing() -> None:
    pictures = re.findall(r"docs/assets/[\w.-]+", PAGE)
    assert {Path(picture).suffix for picture in pictures} == {".svg", ".png"}
    for picture in pictures:
        data = (ROOT / picture).read_bytes()
        assert len(data) < 500_000
        assert re.search(rb"""(?:url\(|href=)["']?https?:""", data) is None


def test_the_picture_of_the_demo_is_what_it_prints_without_its_progress() -> None:
    bars = " training \x1b[91m---\x1b[0m step 1\r\x1b[2K\x1b[1A training --- step 2\n"
    output = f"\x1b[1;36m-- Training\x1b[0m\n{bars}SIGKILL\n-- For orchestrators\n{{}}"
    shown = re.sub("<[^>]+>", "", svg_of(output)).replace("&#160;", " ")
    found = {text for text in ("-- Training", "SIGKILL", "step 1", "step 2", "orchestrators") if text in shown}
    assert found == {"-- Training", "SIGKILL"}
