"""login: stores a daemon's address and token as a profile. config: shows profiles. open: a dashboard in a browser.

version, completion: of this program.
"""

from __future__ import annotations

import getpass
import sys
import webbrowser
from enum import StrEnum
from importlib.metadata import version as installed_version
from typing import Annotated
from urllib.parse import quote

from typer.completion import get_completion_script  # type: ignore[attr-defined]

from ckptapi.opening import open_source
from ckptctl.commands.arguments import a_checkpoint, a_flag, an_argument, an_option
from ckptctl.profiles import load_profiles, save_profile
from ckptctl.render import Table
from ckptctl.session import Session
from ckptctl.targets import choose_target
from ckptstore.errors import CkptError, InvalidRequest
from ckptstore.names import check_run


def login(
    session: Session,
    url: Annotated[str | None, an_argument("The daemon; by default --url.", "URL")] = None,
    name: Annotated[str, an_option("Name of the profile.", "NAME")] = "default",
) -> None:
    """Check a token, and store it with the daemon's address as a profile.

    The token comes from --token, from CKPT_TOKEN, or is asked for without being shown; from a pipe it is the first
    line. It is stored in a file that only you can read. The first profile becomes the default one. A profile of the
    same name and address gets the new token.
    """
    given = session.given
    url = url or given["url"]
    if not url:
        raise InvalidRequest("login needs the address of a daemon", "Use ckptctl login http://HOST:8470")
    target = choose_target(url, None, given["token"] or _ask(), {"url"}, cacert=given["cacert"])
    source = open_source(target.url, target.token, cacert=target.cacert)
    try:
        source.runs()
    finally:
        source.close()
    path = save_profile(name, target.url, target.token or "", target.cacert)
    body = {"profile": name, "url": target.url, "file": str(path)}
    session.screen.emit(body, [name], [f"profile {name}: {target.url}, stored in {path}"])


def _ask() -> str:
    token = getpass.getpass("Token: ") if sys.stdin.isatty() else sys.stdin.readline()
    if not token.strip():
        raise InvalidRequest("no token is given", "Pass --token, set CKPT_TOKEN, or type it when asked")
    return token.strip()


def open_page(
    session: Session,
    which: Annotated[str | None, a_checkpoint("The page of a run or checkpoint; without it, the list of runs.")] = None,
    browser: Annotated[bool, a_flag("Only print the address.", "--browser/--no-browser")] = True,
) -> None:
    """Open the dashboard of a daemon in a browser, and print its address.

    The environment variable BROWSER names the program. Without a browser, the address is only printed.
    """
    page = session.daemon("open").url + _path(session, which)
    if browser and not webbrowser.open(page):
        session.screen.note("no browser was found: open this address yourself")
    session.screen.emit({"url": page}, [page], [page])


def _path(session: Session, which: str | None) -> str:
    if which is None:
        return "/"
    if "@" not in which:
        return f"/runs/{quote(check_run(which), safe='')}"
    return f"/checkpoints/{quote(session.find(which).id, safe='@')}"


def show_config(session: Session) -> None:
    """Show the profiles of the configuration file, and the target in force.

    A target on the command line (--url, --store, --profile) overrides one in the environment (CKPTD_URL, CKPT_STORE,
    CKPTCTL_PROFILE), which overrides the file's own `profile`.
    """
    found = load_profiles()
    try:
        url, origin, token = session.target.url, session.target.origin, session.target.token
    except InvalidRequest as error:
        url, origin, token = None, str(error), None
    profiles = [
        {"name": p.name, "target": p.url or p.store or "", "has_token": p.token is not None} for p in found.profiles
    ]
    body = {
        "file": str(found.path),
        "default": found.default,
        "profiles": profiles,
        "target": url,
        "origin": origin,
        "has_token": token is not None,
    }
    facts = {
        "file": str(found.path) if found.path.exists() else f"{found.path} (not found)",
        "target": url or "none",
        "because of": origin,
        "token": "yes" if token else "none",
    }
    rows = [(p.name, p.url or p.store or "", "yes" if p.token else "none") for p in found.profiles]
    table = Table(("PROFILE", "TARGET", "TOKEN"), rows)
    session.screen.emit(body, [p.name for p in found.profiles], [facts, table])


class Shell(StrEnum):
    """Shells with completion."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def version(session: Session) -> None:
    """Show the version of this program, and of the daemon if --url is set."""
    mine, daemon = installed_version("ckptd"), _daemon_version(session)
    facts = {"ckptctl": mine} | ({"ckptd": daemon} if daemon else {})
    session.screen.emit({"ckptctl": mine, "daemon": daemon}, [mine], [facts])


def completion(shell: Annotated[Shell, an_argument("bash, zsh or fish.")]) -> None:
    """Print the completion script of a shell, for commands, runs and checkpoints."""
    print(get_completion_script(prog_name="ckptctl", complete_var="_CKPTCTL_COMPLETE", shell=shell.value))


def _daemon_version(session: Session) -> str | None:
    try:
        return session.daemon("version").about().version
    except InvalidRequest:
        return None  # there is no target
    except CkptError as error:
        session.screen.note(f"the daemon does not respond: {error}")
        return None
