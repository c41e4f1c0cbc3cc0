"""Arguments that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptctl.completion import checkpoint_names, run_names

RunOption = Annotated[
    str | None,
    typer.Option("--run", "-r", metavar="RUN", help="Limit to one run.", show_default=False, autocompletion=run_names),
]
CheckpointArgument = Annotated[
    str,
    typer.Argument(metavar="ID", help="RUN@STEP, RUN@STEP.ULID or RUN@latest.", autocompletion=checkpoint_names),
]
