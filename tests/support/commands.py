"""Command lines in files, checked against the parsers of the programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from ckpt.saver.launcher import parser
from ckptctl.cli import app
from ckptd.commands import cli


def check_command(words: Sequence[str]) -> None:
    """Fail if the program does not know a word or an option. Nothing runs; other programs are not checked."""
    match words[0]:
        case "ckptctl":
            _check(typer.main.get_command(app), words)
        case "ckptd":
            _check(typer.main.get_command(cli), words)
        case "ckpt-run":
            check_command(parser().parse_args([*words[1:]]).command)


def _check(command: Any, words: Sequence[str], parent: Any = None) -> None:
    context = command.make_context(words[0], [*words[1:]], parent=parent)
    rest = [*context._protected_args, *context.args] if hasattr(command, "resolve_command") else []
    if rest:
        name, found, others = command.resolve_command(context, rest)
        _check(found, [name, *others], context)
