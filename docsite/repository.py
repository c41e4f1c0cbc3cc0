"""Files of the repository as pages of the site, and the links to them.

Adopted pages are Markdown outside of docs/. Any other file that a page links to becomes a page with its text. A folder
becomes a list of the files in it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
ADOPTED = {
    "explanation/benchmarks.md": "bench/README.md",
    "project/changelog.md": "CHANGELOG.md",
    "project/contributing.md": "CONTRIBUTING.md",
    "project/tests.md": "tests/README.md",
}
"""Page of the site: Markdown file of the repository."""
MARK = "ckptd/pages/static/icon.svg"
_HOME = {source: page for page, source in ADOPTED.items()} | {"README.md": "index.md"}
_LINK = re.compile(r"(?<=\]\()(?!https?://|mailto:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".sh": "bash", ".toml": "toml", ".json": "json"}
_PICTURES = (".svg", ".png")


def _resolved(link: str, source: str) -> str:
    """A link in a file of the repository, as a path of the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def _page_of(path: str) -> str:
    """The page or picture of the site for a path of the repository."""
    if path.startswith("docs/") and (ROOT / path).is_file():
        return path.removeprefix("docs/")
    if path == "docs/decisions":
        return "decisions/index.md"
    if path in _HOME:
        return _HOME[path]
    return f"files/{path}" if path.endswith(_PICTURES) else f"files/{path}.md"


class Repository:
    """The files of the repository that the site shows."""

    def relinked(self, markdown: str, source: str, page: str) -> str:
        """The text of a page with its links as the site needs them. source: the file that the text is from. Pure."""

        def link(match: re.Match[str]) -> str:
            target = _page_of(_resolved(match[1], source))
            return posixpath.relpath(target, posixpath.dirname(page) or ".") + (match[2] or "")

        parts, at = [], 0
        for fence in _FENCE.finditer(markdown):
            parts += [_LINK.sub(link, markdown[at : fence.start()]), fence[0]]
            at = fence.end()
        return "".join([*parts, _LINK.sub(link, markdown[at:])])

    def pages(self, texts: Mapping[str, str], config: MkDocsConfig) -> Iterator[File]:
        """The pages to add to a site. texts: its pages so far."""
        from mkdocs.structure.files import File, InclusionLevel

        yield File.generated(config, "assets/mark.svg", content=(ROOT / MARK).read_bytes())
        for page, source in ADOPTED.items():
            yield File.generated(config, page, content=(ROOT / source).read_text())
        sources = {f"docs/{page}": text for page, text in texts.items()}
        sources |= {source: (ROOT / source).read_text() for source in ADOPTED.values()}
        linked = {_resolved(link[1], source) for source, text in sources.items() for link in _LINK.finditer(text)}
        for path in sorted(linked):
            if (target := _page_of(path)).startswith("files/"):
                file = ROOT / path
                if target.endswith(_PICTURES):
                    yield File.generated(config, target, content=file.read_bytes())
                elif file.exists():
                    text = _listing(file, path) if file.is_dir() else _shown(file, path)
                    yield File.generated(config, target, content=text, inclusion=InclusionLevel.NOT_IN_NAV)
        yield File.generated(config, "decisions/index.md", content=_decisions())


def _shown(file: Path, path: str) -> str:
    language = _LANGUAGES.get(file.suffix, "text")
    return f"# {path}\n\n````{language}\n{file.read_text().rstrip()}\n````\n"


def _listing(folder: Path, path: str) -> str:
    names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    return f"# {path}\n\n" + "".join(f"- `{name}`\n" for name in names)


def _decisions() -> str:
    found = sorted((ROOT / "docs/decisions").glob("[0-9]*.md"))
    titles = [(file.name, file.read_text().partition("\n")[0].removeprefix("# ")) for file in found]
    links = "".join(f"- [{title}]({name})\n" for name, title in titles)
    return f"# Decisions\n\nWhy things are as they are: context, decision, consequences, one page for each.\n\n{links}"
