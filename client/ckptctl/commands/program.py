"""version, completion, config: this program, and the target in force."""

from __future__ import annotations

from enum import StrEnum
from importlib.metadata import version as installed_version
from typing import Annotated

import typer
from typer.completion import get_completion_script  # type: ignore[attr-defined]

from ckptctl.profiles import load_profiles
from ckptctl.render import Facts, Row, Table
from ckptctl.session import Session
from ckptstore.errors import CkptError, InvalidRequest
from ckptstore.values import Value

PROGRAM = "ckptctl"


class Shell(StrEnum):
    """Shells with completion."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


class VersionBody(Value):
    """The versions of this program and of the daemon; None without a daemon, or if it does not respond."""

    ckptctl: str
    daemon: str | None


def version(session: Session) -> None:
    """Show the version of this program, and of the daemon if --url is set."""
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


class ProfileBody(Value):
    """One profile as JSON, without its token."""

    name: str
    target: str
    has_token: bool


class ConfigBody(Value):
    """The configuration as JSON."""

    file: str
    default: str | None
    profiles: list[ProfileBody]
    target: str | None
    origin: str
    has_token: bool


def show_config(session: Session) -> None:
    """Show the profiles of the configuration file, and the target in force.

    A target on the command line (--url, --store, --profile) overrides one in the environment (CKPTD_URL, CKPT_STORE,
    CKPTCTL_PROFILE), which overrides the file's own `profile`.
    """
    found = load_profiles()
    profiles = [ProfileBody(p.name, p.url or p.store or "", p.token is not None) for p in found.profiles]
    try:
        target = session.target
        body = ConfigBody(str(found.path), found.default, profiles, target.url, target.origin, target.token is not None)
    except InvalidRequest as error:
        body = ConfigBody(str(found.path), found.default, profiles, None, str(error), False)
    pairs = [
        ("file", body.file if found.path.exists() else f"{body.file} (not found)"),
        ("target", body.target or "none"),
        ("because of", body.origin),
        ("token", "yes" if body.has_token else "none"),
    ]
    columns = ("PROFILE", "TARGET", "TOKEN")
    rows = [Row((p.name, p.target, "yes" if p.has_token else "none")) for p in profiles]
    session.screen.emit(body, [p.name for p in profiles], [Facts(pairs), Table(columns, rows)])
