"""Arguments that several commands share."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ckptapi.bodies import MAX_PAGE
from ckptctl.completion import checkpoint_names, run_names


def a_checkpoint(help: str, metavar: str = "RUN[@STEP]") -> Any:
    """An argument that names a run or a checkpoint; the shell completes it."""
    return typer.Argument(metavar=metavar, help=help, autocompletion=checkpoint_names)


RunArgument = Annotated[
    str | None,
    typer.Argument(metavar="RUN", help="One run; * and ? are wildcards.", autocompletion=run_names),
]
CheckpointArgument = Annotated[str, a_checkpoint("RUN@STEP, RUN@STEP.ULID, or RUN for its newest checkpoint.")]
LocalOption = Annotated[
    str | None,
    typer.Option("--local", metavar="STORE", help="Also a local tier: where are they?"),
]
ChosenArgument = Annotated[
    list[str] | None,
    a_checkpoint("Single checkpoints, or all checkpoints of a run; * and ? are wildcards: 'gpt@1*'."),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only show which checkpoints are meant.")]
NewestOption = Annotated[int, typer.Option(min=1, max=MAX_PAGE, metavar="N", help="Show the newest N.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
ReasonOption = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why, for the audit log.")]
