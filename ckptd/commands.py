"""The command line of the daemon: `ckptd serve`, `ckptd agent`, `ckptd config`, `ckptd token`."""

from __future__ import annotations

import inspect
import logging
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from typing import Annotated, Any

import typer

from ckptapi.bodies import Scope, TokenRequest
from ckptd import logs
from ckptd.agent import serve_agent
from ckptd.app import create_app
from ckptd.index import Database, TokenIndex
from ckptd.redaction import Redactor, secrets_of
from ckptd.server import serve as serve_app
from ckptd.services.tokens import Tokens
from ckptd.settings import AUTH_OFF, KNOBS, PREFIX, Configuration, load
from ckptstore.clock import system_clock
from ckptstore.errors import CkptError, NotFound

_LOG = logging.getLogger(__name__)
_METAVARS = {str: "TEXT", int: "N", float: "SECONDS"}

cli = typer.Typer(
    name="ckptd",
    help="The checkpoint daemon.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,  # they could print secrets
)
tokens = typer.Typer(help="Access tokens.", no_args_is_help=True, rich_markup_mode=None)
cli.add_typer(tokens, name="token")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ckptd {version('ckptd')}")
        raise typer.Exit


@cli.callback()
def _common(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _flags() -> list[tuple[str, Any]]:
    """Every setting as an option. None if not given: the value may come from the environment or the file."""
    help_of_file = "TOML file of settings, named as these options with underscores."
    options = [("config", typer.Option("--config", metavar="FILE", help=f"{help_of_file} [env: {PREFIX}CONFIG]"))]
    for knob in KNOBS:
        if not knob.metadata["secret"]:
            default = f" [default: {knob.default}]" if knob.default != "" else ""
            text = f"{knob.metadata['text']} [env: {PREFIX}{knob.name.upper()}]{default}"
            flag = f"--{knob.name.replace('_', '-')}"
            options.append((knob.name, typer.Option(flag, metavar=_METAVARS[type(knob.default)], help=text)))
    return options


def _command(group: typer.Typer, name: str) -> Callable[[Callable[..., None]], None]:
    """Register a function of a Configuration as a command that has an option for every setting."""

    def add(work: Callable[..., None]) -> None:
        def run(**options: Any) -> None:
            redact = Redactor(secrets_of(os.environ))
            try:
                configuration = load({name: options.pop(name) for name, _ in flags}, os.environ)
                settings = configuration.settings
                own = [getattr(settings, knob.name) for knob in KNOBS if knob.metadata["secret"]]
                redact = Redactor([*own, *secrets_of(os.environ)])
                logs.configure(settings.log_level, settings.log_format, redact)
                work(configuration, **options)
            except CkptError as error:
                typer.echo(redact(f"ckptd: {error}"), err=True)
                raise typer.Exit(error.exit_code) from error

        flags = _flags()
        arguments = list(inspect.signature(work, eval_str=True).parameters.values())[1:]
        keyword = inspect.Parameter.KEYWORD_ONLY
        settings = [
            inspect.Parameter(name, keyword, default=None, annotation=Annotated[str | None, option])
            for name, option in flags
        ]
        parameters = [parameter.replace(kind=keyword) for parameter in arguments] + settings
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        group.command(name, help=work.__doc__)(run)

    return add


@_command(cli, "serve")
def _serve(configuration: Configuration) -> None:
    """Serve a store over HTTP.

    There is no option for the token, because other users can read command lines. Use CKPTD_TOKEN or the file.
    """
    settings = configuration.settings
    app = create_app(settings)
    if settings.auth != AUTH_OFF and not app.state.context.tokens.any():
        _LOG.warning(
            "there is no token, so every request will be refused: create the first one with ckptd token create"
        )
    serve_app(app, settings)


@_command(cli, "agent")
def _agent(
    configuration: Configuration,
    idle: Annotated[
        float, typer.Option("--idle-seconds", help="End when no process has needed it for this time; 0: never.")
    ] = 0.0,
) -> None:
    """Serve the local tier of this host to the other hosts of its jobs.

    --store is its folder, --host an address that they reach. They prove that they know the token of a run.
    """
    serve_agent(configuration.settings, idle)


@_command(cli, "config")
def _config(configuration: Configuration) -> None:
    """Print the settings in force and where each comes from."""
    lines = configuration.lines()
    widths = [max(len(line[column]) for line in lines) for column in (0, 1)]
    for name, value, origin in lines:
        sys.stdout.write(f"{name:{widths[0]}}  {value:{widths[1]}}  {origin}\n")


@_command(tokens, "create")
def _create_token(
    configuration: Configuration,
    name: Annotated[str, typer.Argument(help="Name of the token, for example its purpose.")],
    scope: Annotated[list[Scope], typer.Option("--scope", help="read, write, prune or admin. May be repeated.")],
    run: Annotated[
        list[str] | None, typer.Option("--run", help="Limit the token to these runs. May be repeated.")
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Revoke a token of this name first, instead of failing.")
    ] = False,
) -> None:
    """Create a token in the database and print its secret. Works with and without a running daemon.

    Use it for the first admin, and ckptctl token for all others.
    """
    asked = TokenRequest(name=name, scopes=scope, runs=run or [])
    database = Database(configuration.settings.db, 1)
    try:
        held = Tokens(TokenIndex(database), "", system_clock)
        if replace:
            with suppress(NotFound):
                held.revoke(name)
        made = held.create(asked, f"ckptd on {socket.gethostname()}"[:64])
    finally:
        database.close()
    typer.echo(made.secret)
