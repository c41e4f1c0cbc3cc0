"""login: stores the address and the token of a daemon as a profile."""

from __future__ import annotations

import getpass
import sys
from typing import Annotated

import msgspec
import typer

from ckptapi.opening import open_source
from ckptctl.profiles import save_profile
from ckptctl.session import Session
from ckptctl.targets import choose_target
from ckptstore.errors import InvalidRequest


class LoginBody(msgspec.Struct, frozen=True):
    """A stored profile as JSON, without its token."""

    profile: str
    url: str
    file: str


def login(
    ctx: typer.Context,
    url: Annotated[
        str | None, typer.Argument(metavar="URL", help="The daemon; by default --url.", show_default=False)
    ] = None,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the profile.")] = "default",
) -> None:
    """Check a token, and store it with the daemon's address as a profile.

    The token comes from --token, from CKPT_TOKEN, or is asked for without being shown; from a pipe it is the first
    line. It is stored in a file that only you can read. The first profile becomes the default one. A profile of the
    same name and address gets the new token.
    """
    session: Session = ctx.obj
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
    body = LoginBody(name, target.url, str(path))
    session.screen.emit(body, [name], [f"profile {name}: {target.url}, stored in {path}"])


def _ask() -> str:
    token = getpass.getpass("Token: ") if sys.stdin.isatty() else sys.stdin.readline()
    if not token.strip():
        raise InvalidRequest("no token is given", "Pass --token, set CKPT_TOKEN, or type it when asked")
    return token.strip()
