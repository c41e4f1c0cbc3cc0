"""The program `ckptctl`: global options, commands, and exit codes for errors."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ckptctl.commands import (
    audit,
    config,
    deletion,
    diff,
    doctor,
    drain,
    drill,
    export,
    goodput,
    import_,
    index,
    jobs,
    listing,
    pins,
    plan,
    policy,
    program,
    prune,
    restores,
    scrub,
    shards,
    show,
    stats,
    tag,
    token,
    verify,
    watch,
    why,
)
from ckptctl.examples import finish_commands
from ckptctl.exits import INTERRUPTED, MEANINGS, OK
from ckptctl.render import Output, Screen, report_error
from ckptctl.session import GLOBAL_OPTIONS, Session, global_options
from ckptstore.errors import CkptError, InvalidRequest

_EPILOG = "\b\nExit codes:\n" + "\n".join(f"  {code:>3}  {meaning}" for code, meaning in MEANINGS.items())


class _Program(TyperGroup):
    """Turns errors into exit codes."""

    def main(self, args: Sequence[str] | None = None, *_: Any, **extra: Any) -> Any:
        arguments = list(sys.argv[1:] if args is None else args)
        extra["standalone_mode"] = False
        sys.exit(_exit_code(lambda: super(_Program, self).main(arguments, **extra), arguments))


class _Command(TyperCommand):
    """Takes the global options in addition to its own, and runs with a Session for them."""

    def get_params(self, ctx: Any) -> list[Any]:
        program = ctx.find_root().command
        return [*super().get_params(ctx), *(option for option in program.params if option.name in GLOBAL_OPTIONS)]

    def invoke(self, ctx: Any) -> Any:
        options = global_options(ctx)
        for name in GLOBAL_OPTIONS:
            ctx.params.pop(name, None)
        given = options.values
        screen = Screen(Output(given["output"]), not given["no_color"], given["quiet"])
        ctx.obj = Session(options.target, screen)
        ctx.call_on_close(ctx.obj.close)
        return super().invoke(ctx)


app = typer.Typer(
    cls=_Program,
    name="ckptctl",
    help="List, verify, export and prune checkpoints, through a daemon (--url) or directly on a store (--store).\n\n"
    "A checkpoint ID is RUN@STEP, RUN@STEP.ULID or RUN@latest. Global options may stand before or after the command.",
    epilog=_EPILOG,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _group in (
    listing,
    show,
    shards,
    stats,
    why,
    diff,
    verify,
    scrub,
    drill,
    drain,
    goodput,
    prune,
    deletion,
    pins,
    tag,
    policy,
    audit,
    export,
    import_,
    restores,
    watch,
    jobs,
    plan,
    doctor,
    index,
    token,
    config,
    program,
):
    _group.register(app)
finish_commands(app, _Command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"ckptctl {version('ckptd')}")
        raise typer.Exit


@app.callback()
def _globals(
    url: Annotated[
        str | None, typer.Option(envvar="CKPTD_URL", metavar="URL", help="A daemon: http://HOST:PORT.")
    ] = None,
    store: Annotated[
        str | None, typer.Option(envvar="CKPT_STORE", metavar="URL", help="A store: a path, file://, s3://, ...")
    ] = None,
    token: Annotated[str | None, typer.Option(envvar="CKPT_TOKEN", metavar="TEXT", help="The daemon's token.")] = None,
    profile: Annotated[
        str | None, typer.Option(envvar="CKPTCTL_PROFILE", metavar="NAME", help="Profile in the configuration file.")
    ] = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="Output format.")] = Output.TABLE,
    no_color: Annotated[bool, typer.Option("--no-color", help="Disable colors (also NO_COLOR).")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print results and errors only.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Declares the global options; each command takes them as well."""


def _exit_code(program: Callable[[], Any], arguments: Sequence[str]) -> int:
    output = _output(arguments)
    color = "--no-color" not in arguments
    try:
        return program() or OK
    except CkptError as error:
        report_error(error, output, color)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        # The reader closed the pipe; the interpreter must not fail when it flushes the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        # Typer exports no base class of its usage errors; all of them format their message.
        if not hasattr(error, "format_message"):
            raise
        wrong = InvalidRequest(error.format_message().rstrip("."), _usage_hint(error))
        report_error(wrong, output, color)
        return wrong.exit_code


def _output(arguments: Sequence[str]) -> Output:
    """The output format, also when the command line as a whole is wrong."""
    text = " ".join(arguments)
    for found in Output:
        if re.search(rf"(^| )(-o ?|--output[ =]){found}( |$)", text):
            return found
    return Output.TABLE


def _usage_hint(error: Any) -> str:
    ctx = getattr(error, "ctx", None)
    return f"Try '{ctx.command_path} --help'" if ctx is not None else ""


def main() -> None:
    """Run the program and exit."""
    app(prog_name="ckptctl")
