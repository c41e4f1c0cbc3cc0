"""Docstrings of this project as Markdown: an extension of griffe, which reads them for mkdocstrings.

A paragraph of lines `name: meaning`, continued by indented lines, becomes a list of names.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_NAME = re.compile(r"^(\w+): ")


class Docstrings(griffe.Extension):
    """Rewrites the docstring of every object that is loaded, and heads the signature of `ckpt.init` with its name."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """One object."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
        if obj.path == "ckpt.config.Config":
            obj.name = "init"  # whose parameters are the fields of this class


def as_markdown(text: str) -> str:
    """A docstring as Markdown. Pure."""
    return "\n\n".join(_paragraph(paragraph) for paragraph in text.split("\n\n"))


def _paragraph(text: str) -> str:
    lines = text.splitlines()
    listed = bool(lines) and all(_NAME.match(line) or line.startswith("    ") for line in lines)
    if not listed or not _NAME.match(lines[0]) or (len(lines) > 1 and not any(map(_NAME.match, lines[1:]))):
        return text
    return "\n".join(_NAME.sub(r"- **`\1`**: ", line) for line in lines)
