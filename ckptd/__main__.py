"""The command line of the daemon: `ckptd serve`, or `python -m ckptd serve`."""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Annotated, Any

import typer

from ckptd import logs
from ckptd.app import create_app
from ckptd.server import serve as serve_app
from ckptd.settings import Settings, default_cache, default_db
from ckptstore.errors import CkptError

_DEFAULTS = Settings(store="", db="")

cli = typer.Typer(name="ckptd", help="The checkpoint daemon.", no_args_is_help=True, add_completion=False)


def _knob(name: str, text: str = "") -> Any:
    return typer.Option(f"--{name.replace('_', '-')}", envvar=f"CKPTD_{name.upper()}", help=text)


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


@cli.command()
def serve(
    store: Annotated[str, _knob("store", "URL of the store: file:///folder, s3://bucket/folder.")],
    db: Annotated[str, _knob("db", "SQLAlchemy URL of the index. Default: a file in the state folder.")] = "",
    host: Annotated[str, _knob("host")] = _DEFAULTS.host,
    port: Annotated[int, _knob("port", "0: any free one.")] = _DEFAULTS.port,
    insecure: Annotated[bool, _knob("insecure", "Listen beyond loopback without CKPTD_TOKEN.")] = _DEFAULTS.insecure,
    cache: Annotated[str, _knob("cache", "Folder of the cache. Default: in the user's cache folder.")] = "",
    cache_bytes: Annotated[int, _knob("cache_bytes", "0: no cache.")] = _DEFAULTS.cache_bytes,
    store_reads: Annotated[int, _knob("store_reads", "For readers, at a time.")] = _DEFAULTS.store_reads,
    poll_seconds: Annotated[float, _knob("poll_seconds", "Between two listings.")] = _DEFAULTS.poll_seconds,
    commit_grace: Annotated[float, _knob("commit_grace_seconds")] = _DEFAULTS.commit_grace_seconds,
    collect_seconds: Annotated[float, _knob("collect_seconds")] = _DEFAULTS.collect_seconds,
    orphan_grace: Annotated[float, _knob("orphan_grace_seconds")] = _DEFAULTS.orphan_grace_seconds,
    notice_seconds: Annotated[float, _knob("notice_seconds")] = _DEFAULTS.notice_seconds,
    drain_seconds: Annotated[float, _knob("drain_seconds")] = _DEFAULTS.drain_seconds,
    log_level: Annotated[str, _knob("log_level")] = _DEFAULTS.log_level,
) -> None:
    """Serve a store over HTTP. The token is read from CKPTD_TOKEN: a command line is no place for secrets."""
    try:
        settings = Settings(
            store=store,
            db=db or default_db(store),
            host=host,
            port=port,
            token=os.environ.get("CKPTD_TOKEN", "").strip(),
            insecure=insecure,
            cache=cache or default_cache(store),
            cache_bytes=cache_bytes,
            store_reads=store_reads,
            poll_seconds=poll_seconds,
            commit_grace_seconds=commit_grace,
            collect_seconds=collect_seconds,
            orphan_grace_seconds=orphan_grace,
            notice_seconds=notice_seconds,
            drain_seconds=drain_seconds,
            log_level=log_level,
        )
        logs.configure(settings.log_level)
        app = create_app(settings)
    except CkptError as error:
        typer.echo(f"ckptd: {error}", err=True)
        raise typer.Exit(error.exit_code) from error
    serve_app(app, settings)


def main() -> None:
    """The entry point."""
    cli()


if __name__ == "__main__":
    main()
