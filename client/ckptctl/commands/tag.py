"""tag: tags of a checkpoint, and metrics that were computed after its save."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptapi.bodies import CheckpointBody
from ckptctl.commands.arguments import CheckpointArgument, ReasonOption
from ckptctl.commands.listing import checkpoint_facts
from ckptctl.session import Session
from ckptstore.commits.labels import LabelChange
from ckptstore.errors import InvalidRequest

LabelsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="NAME=VALUE|NAME|NAME-", help="Set a tag, or remove it with a trailing '-'.", show_default=False
    ),
]
MetricOption = Annotated[
    list[str] | None,
    typer.Option(
        "--metric",
        "-m",
        metavar="NAME=NUMBER|NAME-",
        help="Set a metric, or remove a value that was set here.",
        show_default=False,
    ),
]


def tag(
    ctx: typer.Context,
    checkpoint: CheckpointArgument,
    labels: LabelsArgument = None,
    metric: MetricOption = None,
    reason: ReasonOption = "",
) -> None:
    """Set or remove tags and metrics of a checkpoint. Retention by metric (keep best) uses them."""
    session: Session = ctx.obj
    change = LabelChange(dict(map(_tag, labels or ())), dict(map(_metric, metric or ())))
    if not change.tags and not change.metrics:
        raise InvalidRequest("there is nothing to set or remove", "Pass a tag, or --metric NAME=NUMBER")
    found = session.find(checkpoint)
    after = session.operator.label(found, change, reason)
    session.screen.emit(CheckpointBody.of(after), [after.id], [checkpoint_facts(after, session.clock())])


def _tag(text: str) -> tuple[str, str | None]:
    name, equals, value = text.partition("=")
    if not equals and name.endswith("-"):
        return name[:-1], None
    return name, value


def _metric(text: str) -> tuple[str, float | None]:
    name, equals, value = text.partition("=")
    if not equals and name.endswith("-"):
        return name[:-1], None
    try:
        return name, float(value)
    except ValueError:
        raise InvalidRequest(f"{text!r} is not a metric", "Use NAME=NUMBER, or NAME- to remove it") from None
