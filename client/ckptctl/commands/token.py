"""token: the access tokens of a daemon."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptapi.bodies import NewTokenBody, RotateRequest, Scope, TokenBody, TokenRequest
from ckptctl.commands.arguments import an_argument, an_option
from ckptctl.render import Row, Table
from ckptctl.session import Session
from ckptstore import human

TokenNameArgument = Annotated[str, an_argument("Name of the token, for example its purpose.", "NAME")]

group = typer.Typer(help="Manage the access tokens of a daemon.", no_args_is_help=True, rich_markup_mode=None)


@group.command("create")
def create(
    session: Session,
    name: TokenNameArgument,
    scope: Annotated[list[Scope], an_option("read, write, prune or admin. May be repeated.")],
    run: Annotated[
        list[str] | None, an_option("Limit the token to these runs. May be repeated.", "GLOB", "--run", "-r")
    ] = None,
    expires: Annotated[str | None, an_option("Expire after this time: 90s, 24h, 30d.", "TIME")] = None,
) -> None:
    """Create a token and print its secret, which is never shown again."""
    expires_in_s = human.parse_duration(expires) if expires else None
    request = TokenRequest(name=name, scopes=scope, runs=run or [], expires_in_s=expires_in_s)
    _show(session, session.daemon("token create").create_token(request))


@group.command("ls")
def list_tokens(session: Session) -> None:
    """List tokens, without their secrets."""
    found = session.daemon("token ls").tokens()
    now, none = session.clock(), f"no tokens at {session.source.url}"
    columns = ("TOKEN", "SCOPES", "RUNS", ">USED", ">EXPIRES", ">CREATED/1", "BY/2")
    table = Table(columns, [_row(token, now) for token in found])
    session.screen.emit(found, [token.name for token in found], [table], none=none)


@group.command("rotate")
def rotate(
    session: Session,
    name: TokenNameArgument,
    keep_old: Annotated[str, an_option("Keep the old secret valid for this time.", "TIME")] = "0s",
) -> None:
    """Give a token a new secret and print it."""
    request = RotateRequest(keep_old_s=human.parse_duration(keep_old))
    _show(session, session.daemon("token rotate").rotate_token(name, request))


@group.command("revoke")
def revoke(session: Session, name: TokenNameArgument) -> None:
    """Revoke a token. It is refused from now on."""
    session.daemon("token revoke").revoke_token(name)
    session.screen.note(f"Token {name} is revoked")


def _show(session: Session, made: NewTokenBody) -> None:
    token = made.token
    runs = ", ".join(token.runs) or "all runs"
    session.screen.note(f"Token {token.name}: {', '.join(token.scopes)} for {runs}. It is not shown again.")
    session.screen.emit(made, [made.secret], [made.secret])


def _row(token: TokenBody, now: float) -> Row:
    expires, style = "never", ""
    if token.expires_at is not None:
        expires = f"in {human.age(token.expires_at - now)}"
        if token.expires_at <= now:
            expires, style = "expired", "dim"
    used = f"{human.age(now - token.used_at)} ago" if token.used_at is not None else "never"
    created = f"{human.age(now - token.created_at)} ago"
    scopes, runs = ",".join(token.scopes), ",".join(token.runs) or "all"
    return Row((token.name, scopes, runs, used, expires, created, token.created_by), style)
