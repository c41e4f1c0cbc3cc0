"""Arguments that several commands share."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ckptapi.bodies import MAX_PAGE
from ckptctl.completion import checkpoint_names, run_names


def an_argument(help: str, metavar: str | None = None, **more: Any) -> Any:
    """An argument of a command."""
    return typer.Argument(metavar=metavar, help=help, **more)


def a_checkpoint(help: str, metavar: str = "RUN[@STEP]") -> Any:
    """An argument that names a run or a checkpoint; the shell completes it."""
    return an_argument(help, metavar, autocompletion=checkpoint_names)


def an_option(help: str, metavar: str | None = None, *flags: str, **more: Any) -> Any:
    """An option with a value. flags: its names, if they are not the parameter's."""
    return typer.Option(*flags, metavar=metavar, help=help, **more)


def a_flag(help: str, *names: str) -> Any:
    """An option without a value, which has no opposite unless it is named."""
    return typer.Option(*names, help=help)


RunArgument = Annotated[str | None, an_argument("One run; * and ? are wildcards.", "RUN", autocompletion=run_names)]
CheckpointArgument = Annotated[str, a_checkpoint("RUN@STEP, RUN@STEP.ULID, or RUN for its newest checkpoint.")]
LocalOption = Annotated[str | None, an_option("Also a local tier: where are they?", "STORE")]
ChosenArgument = Annotated[
    list[str] | None, a_checkpoint("Single checkpoints, or all checkpoints of a run; * and ? are wildcards: 'gpt@1*'.")
]
DryRunOption = Annotated[bool, a_flag("Only show which checkpoints are meant.", "--dry-run")]
NewestOption = Annotated[int, an_option("Show the newest N.", "N", min=1, max=MAX_PAGE)]
YesOption = Annotated[bool, a_flag("Do not ask.", "--yes", "-y")]
ReasonOption = Annotated[str, an_option("Why, for the audit log.", "TEXT")]
