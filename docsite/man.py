"""python -m docsite.man writes docsite/ckptctl.1, the man page of ckptctl, which the wheel installs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from typer.main import get_command

from ckptctl import cli, manual

PAGE = Path(__file__).with_name("ckptctl.1")
_TARGETS = "Commands work on a store or through a daemon. These options choose it, before or after the command."


def man_page() -> str:
    """The page in the man macros of roff."""
    program: Any = get_command(cli.app)
    context = typer.Context(program, info_name="ckptctl")
    lines = ['.TH CKPTCTL 1 "" ckptd', ".SH NAME", "ckptctl \\- list, verify, export and prune checkpoints"]
    lines += [".SH SYNOPSIS", ".B ckptctl", _text(program.get_usage(context).partition("ckptctl ")[2])]
    lines += [".SH DESCRIPTION", *_paragraphs(program.help), ".SH OPTIONS", _text(_TARGETS), *_options(program)]
    for section, names in manual.SECTIONS.items():
        lines.append(f".SH {_text(section.upper())}")
        for name in names:
            lines += _command(program.get_command(context, name), context)
    return "\n".join([*lines, ".SH EXIT STATUS", *_examples(program.epilog)]) + "\n"


def _command(command: Any, parent: typer.Context) -> Iterator[str]:
    context = typer.Context(command, info_name=command.name, parent=parent)
    yield f".SS {_text(command.get_usage(context).removeprefix('Usage: '))}"
    yield from _paragraphs(command.help)
    yield from _options(command)
    if command.epilog:
        yield ".PP\nExamples:"
        yield from _examples(command.epilog)
    for child in getattr(command, "commands", {}).values():
        yield from _command(child, context)


def _options(command: Any) -> Iterator[str]:
    for one in command.params:
        if one.hidden or not one.help:
            continue
        value = one.metavar or one.name.upper()
        names = ", ".join([*one.opts, *one.secondary_opts]) if one.param_type_name == "option" else value
        takes = one.param_type_name == "option" and not one.is_flag
        yield f".TP\n.B {_text(names + (f' {value}' if takes else ''))}\n{_text(one.help)}"


def _paragraphs(help: str | None) -> Iterator[str]:
    for paragraph in (help or "").replace("\b\n", "").split("\n\n"):
        yield f".PP\n{_text(' '.join(paragraph.split()))}"


def _examples(epilog: str) -> Iterator[str]:
    yield ".nf"
    yield from (_text(line) for line in epilog.strip("\b\n").splitlines()[1:])
    yield ".fi"


def _text(text: str) -> str:
    """Text with roff's own characters escaped; a line may not begin with a dot or a quote."""
    return re.sub(r"^([.'])", r"\\&\1", text.replace("\\", "\\e").replace("-", "\\-"))


if __name__ == "__main__":
    PAGE.write_text(man_page())
