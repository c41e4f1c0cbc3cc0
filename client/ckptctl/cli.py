"""The program `ckptctl`: its global options, its commands, and how errors become exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from itertools import islice, pairwise
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ckptctl.commands import (
    audit,
    config,
    deletion,
    doctor,
    export,
    import_,
    index,
    jobs,
    listing,
    pins,
    policy,
    program,
    prune,
    restores,
    scrub,
    shards,
    show,
    tag,
    token,
    verify,
    watch,
)
from ckptctl.examples import add_examples
from ckptctl.exits import INTERRUPTED, MEANINGS, OK
from ckptctl.render import Output, Screen, report_error
from ckptctl.session import Session
from ckptctl.target import target_of
from ckptstore.errors import CkptError, InvalidRequest

_WITH_VALUE = ("--url", "--token", "--store", "--profile", "--output", "-o")
_JOINED = tuple(f"{name}=" for name in _WITH_VALUE if name.startswith("--"))
_FLAGS = ("--no-color", "--quiet", "-q")

# Typer carries click under a name of its own from some version on; its classes are the same in both.
_ClickError: Any = typer.BadParameter.__mro__[2]

_EPILOG = "\b\nExit codes:\n" + "\n".join(f"  {code:>3}  {meaning}" for code, meaning in MEANINGS.items())


def hoist(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Global options, wherever they stand, and the rest. Pure."""
    front: list[str] = []
    rest: list[str] = []
    items = iter(args)
    for item in items:
        if item == "--":
            rest += [item, *items]
        elif item in _WITH_VALUE:
            front += [item, *islice(items, 1)]
        elif item in _FLAGS:
            front.append(item)
        elif item.startswith(_JOINED):
            front += item.split("=", 1)
        elif item.startswith("-o"):
            front += ["-o", item[2:]]
        else:
            rest.append(item)
    return front, rest


class _Program(TyperGroup):
    """Takes global options before and after the command, and turns errors into exit codes."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        front, rest = hoist(args)
        return super().parse_args(ctx, front + rest)

    def main(self, args: Sequence[str] | None = None, *_: Any, **extra: Any) -> Any:
        arguments = list(sys.argv[1:] if args is None else args)
        extra["standalone_mode"] = False
        front, _rest = hoist(arguments)
        sys.exit(_exit_code(lambda: super(_Program, self).main(arguments, **extra), front))


app = typer.Typer(
    cls=_Program,
    name="ckptctl",
    help="Look at, check, export and prune checkpoints: through a daemon (--url) or straight on a store (--store).\n\n"
    "A checkpoint ID is RUN@STEP, RUN@STEP.ULID or RUN@latest. Global options may also stand after the command.",
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
    verify,
    scrub,
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
    doctor,
    index,
    token,
    config,
    program,
):
    _group.register(app)
add_examples(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"ckptctl {version('ckptd')}")
        raise typer.Exit


@app.callback()
def _globals(
    ctx: typer.Context,
    url: Annotated[
        str | None, typer.Option(envvar="CKPTD_URL", metavar="URL", help="A daemon: http://HOST:PORT.")
    ] = None,
    store: Annotated[
        str | None, typer.Option(envvar="CKPT_STORE", metavar="URL", help="A store: a path, file://, s3://, ...")
    ] = None,
    token: Annotated[str | None, typer.Option(envvar="CKPT_TOKEN", metavar="TEXT", help="The daemon's token.")] = None,
    profile: Annotated[
        str | None, typer.Option(envvar="CKPTCTL_PROFILE", metavar="NAME", help="Of the configuration file.")
    ] = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="Form of the results.")] = Output.TABLE,
    no_color: Annotated[bool, typer.Option("--no-color", help="No colours (also NO_COLOR).")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Results and errors only.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    # target_of reads the first four from the context: completion has nothing else.
    session = Session(lambda: target_of(ctx), Screen(output, not no_color, quiet))
    ctx.obj = session
    ctx.call_on_close(session.close)


def _exit_code(program: Callable[[], Any], front: Sequence[str]) -> int:
    output = _output(front)
    color = "--no-color" not in front
    try:
        return program() or OK
    except CkptError as error:
        report_error(error, output, color)
        return error.exit_code
    except _ClickError as error:
        wrong = InvalidRequest(error.format_message().rstrip("."), _usage_hint(error))
        report_error(wrong, output, color)
        return wrong.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has seen enough; the interpreter must not fail at flushing the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _output(front: Sequence[str]) -> Output:
    """The form asked for, also when the command line as a whole is wrong."""
    for name, value in pairwise(front):
        if name in ("-o", "--output") and value in list(Output):
            return Output(value)
    return Output.TABLE


def _usage_hint(error: Any) -> str:
    ctx = getattr(error, "ctx", None)
    return f"Try '{ctx.command_path} --help'" if ctx is not None else ""


def main() -> None:
    """Run the program and exit."""
    app(prog_name="ckptctl")
