"""The site: built strictly, complete, and readable from a disk without a network."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ckpt
from ckptd.settings import KNOBS
from ckptstore.errors import kinds
from docsite import man
from tests.browser.webdriver import missing, running_browser
from tests.docs.blocks import ROOT
from tests.support.waiting import wait_until

_LOADED = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=\"?((?:https?:)?//[^\"\s>]+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site. A link that leads nowhere, or a page outside of the navigation, fails the build."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)], cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def test_nothing_is_loaded_from_the_network(site: Path) -> None:
    pages = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert len(pages) > 60
    assert {page.name: _LOADED.findall(page.read_text()) for page in pages if _LOADED.search(page.read_text())} == {}
    assert [page.name for page in pages if re.search(r"url\([\"']?https?:", page.read_text())] == []


def test_every_public_name_setting_error_and_command_has_its_place(site: Path) -> None:
    python = (site / "reference/python.html").read_text()
    assert [name for name in ckpt.__all__ if f"ckpt.{name}" not in python] == []
    signature = re.sub("<[^>]+>", "", python[python.index('id="ckpt.config.init"') :])
    assert re.search(r"^init\(\s+store: str", signature, re.MULTILINE)
    settings = (site / "reference/settings.html").read_text()
    assert [knob.name for knob in KNOBS if f"CKPTD_{knob.name.upper()}" not in settings] == []
    errors = (site / "reference/errors.html").read_text()
    assert [
        code for code, kind in kinds().items() if kind.__module__ == "ckptstore.errors" and f'id="{code}"' not in errors
    ] == []
    commands = (site / "reference/command-line.html").read_text()
    assert {"ckptctl ls", "ckptctl policy set", "ckptd serve", "ckpt-run"} <= set(
        re.findall(r"ckp[\w-]+(?: \w+)*", commands)
    )
    assert "/v1/checkpoints/{id}" in (site / "reference/http.html").read_text()
    assert "ckptd_checkpoint_age_seconds" in (site / "reference/metrics.html").read_text()


def test_the_man_page_is_that_of_the_program() -> None:
    assert man.PAGE.read_text() == man.man_page(), "python -m docsite.man writes it"
    assert man.man_page() == man.man_page(), "commands are loaded again"


def test_comments_for_tests_are_left_out(site: Path) -> None:
    assert [
        page.name for page in site.rglob("*.html") if re.search("<!-- (not run|output|setup)", page.read_text())
    ] == []


def test_the_search_knows_every_page_for_users(site: Path) -> None:
    index = (site / "search/search_index.js").read_text()
    found = {
        entry["location"].partition("#")[0]
        for entry in json.loads(index[index.index("{") : index.rindex("}") + 1])["docs"]
    }
    others = ("404.html", "decisions/", "project/", "explanation/format.html", "explanation/internals.html")
    pages = {str(page.relative_to(site)) for page in site.rglob("*.html")}
    assert {page for page in pages if not page.startswith(others)} - found == set()
    assert {page for page in found if page.startswith(others)} == set()


@pytest.mark.skipif(bool(missing()), reason=f"needs {missing()}")
def test_the_search_works_from_a_disk(site: Path) -> None:
    with running_browser() as browser:
        browser.open(f"file://{site}/tutorials/ddp.html")
        browser.run("const box = document.querySelector('#__search'); box.click()")
        browser.type("input.md-search__input", "preemption")
        titles = "return [...document.querySelectorAll('.md-search-result__item h1')].map(title => title.innerText)"
        wait_until(lambda: "Preemption" in browser.run(titles), "the results of a search")
        assert browser.complaints() == []
