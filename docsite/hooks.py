"""Hooks that mkdocs calls while it builds the site (`hooks` in mkdocs.yml).

A page of docs/reference is written by hand up to its line `<!-- made from the code: NAME -->`, which becomes the
reference. Links from a page to a file of the repository lead to a page that shows this file, so the site needs no
network.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mkdocs.utils import get_relative_url

from docsite.programs import command_line, endpoints, metrics
from docsite.reference import errors, public_names, settings
from docsite.repository import ADOPTED, Repository

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

SEARCH = "assets/offline-search.js"
FOR_DEVELOPERS = ("decisions/", "explanation/format", "explanation/internals", "project/")
MADE = {
    "command line": command_line,
    "endpoints": endpoints,
    "errors": errors,
    "metrics": metrics,
    "public names": public_names,
    "settings": settings,
}
_PLACE = re.compile(r"^<!-- made from the code: ([\w ]+) -->$", re.MULTILINE)

_SETUP = re.compile(r"^<!-- (?:setup\n.*?^|not run: [^\n]*|output )-->\n", re.MULTILINE | re.DOTALL)
_SHIM = re.compile(r"https://unpkg\.com/iframe-worker/shim")

_repository = Repository()


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are files of the repository: the adopted ones, and those that a page links to."""
    pages = {file.src_uri: file.content_string for file in files.documentation_pages()}
    for file in _repository.pages(pages, config):
        files.append(file)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Puts in what is made from the code, leaves out what is for tests, and makes links to files links to pages.

    The search leaves out what only developers read.
    """
    page.meta.setdefault("search", {"exclude": page.file.src_uri.startswith(FOR_DEVELOPERS)})
    made = _PLACE.sub(lambda place: MADE[place[1]](), _SETUP.sub("", markdown))
    source = ADOPTED.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    return _repository.relinked(made, source, page.file.src_uri)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """The theme loads its search from the network where a site is read from a disk; ours is one of our files."""
    return _SHIM.sub(get_relative_url(SEARCH, page.url), output)


def on_post_template(output: str, template_name: str, config: MkDocsConfig) -> str:
    """The same, for the page of a missing page."""
    return _SHIM.sub(SEARCH, output)
