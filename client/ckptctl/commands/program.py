"""version, completion: the version and the shell completion of this program."""

from __future__ import annotations

from enum import StrEnum
from importlib.metadata import version as installed_version
from typing import Annotated

import msgspec
import typer
from typer.completion import get_completion_script  # type: ignore[attr-defined]

from ckptctl.render import Facts
from ckptctl.session import Session
from ckptstore.errors import CkptError, InvalidRequest

PROGRAM = "ckptctl"


class Shell(StrEnum):
    """Shells with completion."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


class VersionBody(msgspec.Struct, frozen=True):
    """The versions of this program and of the daemon; None without a daemon, or if it does not respond."""

    ckptctl: str
    daemon: str | None


def version(ctx: typer.Context) -> None:
    """Show the version of this program, and of the daemon if --url is set."""
    session: Session = ctx.obj
    body = VersionBody(installed_version("ckptd"), _daemon_version(session))
    facts = [("ckptctl", body.ckptctl), *([("ckptd", body.daemon)] if body.daemon else [])]
    session.screen.emit(body, [body.ckptctl], [Facts(facts)])


def completion(shell: Annotated[Shell, typer.Argument(help="bash, zsh or fish.")]) -> None:
    """Print the completion script of a shell, for commands, runs and checkpoints."""
    print(get_completion_script(prog_name=PROGRAM, complete_var="_CKPTCTL_COMPLETE", shell=shell.value))


def _daemon_version(session: Session) -> str | None:
    try:
        return session.daemon("version").about().version
    except InvalidRequest:
        return None  # there is no target
    except CkptError as error:
        session.screen.note(f"the daemon does not respond: {error}")
        return None
