"""The program `ckptctl`: global options, commands, and exit codes for errors."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import CommandInfo

from ckptctl import manual
from ckptctl.output import INTERRUPTED, MEANINGS, OK, Output
from ckptctl.targets import GLOBAL_OPTIONS, global_options
from ckptstore.errors import CkptError, InvalidRequest, NoCheckpoint

_EPILOG = "\b\nExit codes:\n" + "\n".join(f"  {code:>3}  {meaning}" for code, meaning in MEANINGS.items())
_SETTINGS = {"help_option_names": ["-h", "--help"]}


class _Program(TyperGroup):
    """Imports commands when they are used, and turns errors into exit codes."""

    def list_commands(self, ctx: Any) -> list[str]:
        """All commands, by section."""
        return list(manual.FUNCTIONS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a name or an alias; None for an unknown word."""
        name = manual.ALIASES.get(cmd_name, cmd_name)
        if name not in self.commands and (function := manual.FUNCTIONS.get(name)):
            self.commands[name] = _load(name, function)
        return self.commands.get(name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As the framework's. Raises InvalidRequest for an unknown word, with the commands it may stand for."""
        word = args[0]
        if self.get_command(ctx, word) is None and not word.startswith("-"):
            meant = [f"ckptctl {name}" for name in manual.suggestions(word)]
            hint = f"Did you mean {' or '.join(meant)}?" if meant else "ckptctl --help lists the commands"
            raise InvalidRequest(f"there is no command {word!r}", hint)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Print the sections of the manual."""
        for title, commands in manual.SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, summary) for name, (_, summary) in commands.items()])

    def main(self, args: Sequence[str] | None = None, *_: Any, **extra: Any) -> Any:
        arguments = list(sys.argv[1:] if args is None else args)
        extra |= {"standalone_mode": False, "obj": arguments}
        sys.exit(_exit_code(lambda: super(_Program, self).main(arguments, **extra), arguments))


def _load(name: str, function: str) -> Any:
    """The command with this name. function: its module in ckptctl.commands, and its name there."""
    module, _, attribute = function.partition(".")
    found = getattr(import_module(f"ckptctl.commands.{module}"), attribute)
    program = typer.Typer(rich_markup_mode=None, context_settings=_SETTINGS)
    if isinstance(found, typer.Typer):
        program.add_typer(found, name=name)
    else:
        program.command(name)(found)
    manual.finish_commands(program, _finish)
    return typer.main.get_group(program).commands[name]


def _finish(command: CommandInfo) -> None:
    from ckptctl.commands.struct_options import with_session

    assert command.callback is not None
    command.cls, command.callback = _Command, with_session(command.callback)


class _Command(TyperCommand):
    """Takes the global options in addition to its own, and runs with a Session for them."""

    def get_params(self, ctx: Any) -> list[Any]:
        program = ctx.find_root().command
        return [*super().get_params(ctx), *(option for option in program.params if option.name in GLOBAL_OPTIONS)]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        # Typer prints the name of a required argument in braces.
        return [re.sub(r"^\{(.*)\}(?=$|\.\.\.$)", r"\1", piece) for piece in super().collect_usage_pieces(ctx)]

    def invoke(self, ctx: Any) -> Any:
        options = global_options(ctx)
        for name in GLOBAL_OPTIONS:
            ctx.params.pop(name, None)
        given = options.values
        from ckptctl.render import Screen
        from ckptctl.session import Session

        screen = Screen(Output(given["output"]), not given["no_color"], given["quiet"])
        ctx.obj = session = Session(options.target, screen, given=given, arguments=ctx.obj)
        ctx.call_on_close(session.close)
        with screen.patience(lambda: f"waiting for {session.target.url}"):
            try:
                return super().invoke(ctx)
            except NoCheckpoint as error:
                from ckptstore.reading.source import suggest_run

                suggest_run(error, session.source)
                raise


app = typer.Typer(
    cls=_Program,
    name="ckptctl",
    help="List, verify, export and prune checkpoints, through a daemon (--url) or directly on a store (--store).\n\n"
    "A checkpoint is RUN@STEP, RUN@STEP.ULID, or RUN for the newest of the run. Global options may stand before or "
    "after the command.",
    epilog=_EPILOG,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=_SETTINGS,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

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
    cacert: Annotated[
        str | None,
        typer.Option(envvar="CKPTD_CA", metavar="FILE", help="Certificates (PEM) to check the daemon's against."),
    ] = None,
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
    try:
        return program() or OK
    except CkptError as error:
        return _report(error, arguments)
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
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message(), file=sys.stderr)
            return InvalidRequest.exit_code
        return _report(InvalidRequest(error.format_message().rstrip("."), _usage_hint(error)), arguments)


def _report(error: CkptError, arguments: Sequence[str]) -> int:
    from ckptctl.render import report_error

    report_error(error, _output(arguments), "--no-color" not in arguments)
    return error.exit_code


def _output(arguments: Sequence[str]) -> Output:
    """The output format, also when the command line as a whole is wrong."""
    text = " ".join(arguments)
    for found in Output:
        if re.search(rf"(^| )(-o ?|--output[ =]){found}( |$)", text):
            return found
    return Output.TABLE


def _usage_hint(error: Any) -> str:
    ctx = getattr(error, "ctx", None)
    if getattr(error, "option_name", "") in ("--run", "-r") and ctx is not None:
        return f"The run is an argument: {ctx.command_path} RUN"
    return f"Try '{ctx.command_path} --help'" if ctx is not None else ""


def main() -> None:
    """Run the program and exit."""
    app(prog_name="ckptctl")
