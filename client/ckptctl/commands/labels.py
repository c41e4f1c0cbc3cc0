"""pin: named holds without expiry. tag: tags of a checkpoint, and metrics that were computed after its save."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from ckptapi.bodies import CheckpointBody
from ckptapi.listing import is_glob
from ckptctl.commands.arguments import (
    CheckpointArgument,
    DryRunOption,
    ReasonOption,
    a_checkpoint,
    a_flag,
    an_argument,
    an_option,
)
from ckptctl.commands.listing import checkpoint_facts, show_meant
from ckptctl.render import Block, Table
from ckptctl.session import Session
from ckptstore.commits.catalog import Checkpoint
from ckptstore.commits.labels import LabelChange
from ckptstore.errors import InvalidRequest
from ckptstore.retention.pins import NamedPin


def pin(
    session: Session,
    checkpoint: Annotated[
        str | None,
        a_checkpoint("The checkpoint; RUN for its newest one; * and ? are wildcards. Without NAME: the runs to list."),
    ] = None,
    name: Annotated[str | None, an_argument("Name of the pin, for example: paper.", "NAME")] = None,
    remove: Annotated[bool, a_flag("Remove the pin; a missing one is ignored.", "--remove")] = False,
    dry_run: DryRunOption = False,
    reason: ReasonOption = "",
) -> None:
    """Keep a checkpoint until the pin is removed, regardless of policies. Without NAME: list pins.

    A checkpoint may have several pins, and a name may pin several checkpoints.
    """
    if name is None or checkpoint is None:
        _list(session, checkpoint, remove)
        return
    if remove and "@" not in checkpoint:
        raise InvalidRequest(
            f"{checkpoint!r} names a run, whose newest checkpoint may not be the pinned one",
            f"Use ckptctl pin {checkpoint}@STEP {name} --remove; ckptctl pin {checkpoint} lists the pins",
        )
    found = session.labelled(checkpoint)
    if dry_run:
        show_meant(session, "unpin" if remove else "pin", found)
        return
    for one in found:
        if remove:
            session.operator.unpin(one, name)
        else:
            session.operator.pin(one, name, reason)
    texts = [f"unpinned {one.id} from {name}" if remove else f"pinned {one.id} as {name}" for one in found]
    _emit(session, checkpoint, [NamedPin(id=one.id, name=name) for one in found], texts)


def _emit(session: Session, named: str, bodies: Sequence[NamedPin | CheckpointBody], blocks: Sequence[Block]) -> None:
    """A list if a pattern named the checkpoints, else the one body."""
    session.screen.emit(bodies if is_glob(named) else bodies[0], [body.id for body in bodies], blocks)


def _list(session: Session, run: str | None, remove: bool) -> None:
    if remove or (run is not None and "@" in run):
        raise InvalidRequest("no name of a pin is given", "Use ckptctl pin RUN@STEP NAME")
    found = [body for each in session.run_names(run) for body in session.operator.pins(each)]
    table = Table(("CHECKPOINT", "PIN"), [(body.id, body.name) for body in found])
    session.screen.emit(found, [body.id for body in found], [table], none="no checkpoint is pinned")


def tag(
    session: Session,
    checkpoint: CheckpointArgument,
    labels: Annotated[
        list[str] | None, an_argument("Set a tag, or remove it with a trailing '-'.", "NAME=VALUE|NAME|NAME-")
    ] = None,
    metric: Annotated[
        list[str] | None,
        an_option("Set a metric, or remove a value that was set here.", "NAME=NUMBER|NAME-", "--metric", "-m"),
    ] = None,
    move: Annotated[bool, a_flag("Also remove these tags from all other checkpoints of the run.", "--move")] = False,
    dry_run: DryRunOption = False,
    reason: ReasonOption = "",
) -> None:
    """Set or remove tags and metrics of a checkpoint. Retention by metric (keep best) uses them.

    RUN@TAG names the newest checkpoint with a tag. With --move a tag is a name that moves: ckptctl tag gpt@1000 prod
    --move, then ckptctl export gpt@prod, or ckpt.load("gpt@prod").
    """
    change = LabelChange(dict(map(_tag, labels or ())), dict(map(_metric, metric or ())))
    if not change.tags and not change.metrics:
        raise InvalidRequest("there is nothing to set or remove", "Pass a tag, or --metric NAME=NUMBER")
    found = session.labelled(checkpoint)
    if move and len({one.run for one in found}) < len(found):
        raise InvalidRequest(
            f"{checkpoint!r} names several checkpoints of a run", "A name that moves is on one of them"
        )
    if dry_run:
        show_meant(session, "label", found)
        return
    after = [session.operator.label(one, change, reason) for one in found]
    if move:
        for one in after:
            _take_from_others(session, one, [name for name, value in change.tags.items() if value is not None], reason)
    facts = [checkpoint_facts(one, session.clock()) for one in after]
    _emit(session, checkpoint, [CheckpointBody.of(one) for one in after], facts)


def _take_from_others(session: Session, holder: Checkpoint, tags: Sequence[str], reason: str) -> None:
    """Remove the tags from all other checkpoints of the run, which has them on `holder` already: a moving name always
    means one of both."""
    for other in session.source.checkpoints(holder.run):
        taken = {name: None for name in tags if name in other.tags and other.id != holder.id}
        if taken:
            session.operator.label(other, LabelChange(taken), reason)


def _tag(text: str) -> tuple[str, str | None]:
    name, equals, value = text.partition("=")
    if not equals and name.endswith("-"):
        return name[:-1], None
    return name, value


def _metric(text: str) -> tuple[str, float | None]:
    name, value = _tag(text)
    try:
        return name, None if value is None else float(value)
    except ValueError:
        raise InvalidRequest(f"{text!r} is not a metric", "Use NAME=NUMBER, or NAME- to remove it") from None
