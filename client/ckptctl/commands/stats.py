"""stats: statistics of the tensors of one checkpoint, or of a run over its steps. why: where they went wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import chain, groupby
from typing import Annotated

from ckptctl.commands.arguments import a_checkpoint, an_argument, an_option
from ckptctl.commands.fleet import in_units
from ckptctl.completion import run_names
from ckptctl.render import Block, Row, Table
from ckptctl.session import Session
from ckptstore.analysis.history import RunFinding, first_trouble, series
from ckptstore.analysis.statistics import CheckpointStatistics, TensorStatistics, read_statistics
from ckptstore.codecs.dtypes import is_float
from ckptstore.errors import InvalidRequest
from ckptstore.names import check_run
from ckptstore.values import Record

_TABLES = 12
_SHOWN = 12


class StatisticsBody(Record):
    """The statistics of the chosen tensors of one checkpoint, as JSON."""

    checkpoint: str
    step: int
    tensors: list[TensorStatistics]
    missing: list[str]
    """Why the statistics of some ranks are missing."""


@in_units("target", lambda session, target, **_: session.run_names(target))
def stats(
    session: Session,
    target: Annotated[str, a_checkpoint("A run, or one checkpoint; * and ? are wildcards for runs.")],
    names: Annotated[str | None, an_option("Only matching tensors, such as 'model/*'.", "PATTERN")] = None,
) -> None:
    """Show extremes, NaN and Inf of tensors: of one checkpoint, or for each checkpoint of a run.

    Statistics are saved with a checkpoint, so its data is not read.
    """
    if "@" in target:
        found = [read_statistics(session.source, session.find_readable(target))]
    else:
        found = []
        for run, listed in session.checkpoints(target).items():
            of_run, skipped = series(session.source, run, listed) if listed else ([], [])
            found += of_run
            for text in skipped:
                session.screen.note(text)
    bodies = [_body(one, names) for one in found]
    if names is not None and not any(body.tensors for body in bodies):
        raise InvalidRequest(f"no tensor of {target} matches {names!r}", "Leave out --names to show all")
    ids = [body.checkpoint for body in bodies]
    by_run = groupby(bodies, lambda body: body.checkpoint.partition("@")[0])
    blocks = chain.from_iterable(_blocks(list(of_run), one="@" in target) for _, of_run in by_run)
    session.screen.emit(bodies[0] if "@" in target else bodies, ids, blocks)


def number(value: float | None) -> str:
    """A value of the statistics, for people."""
    return "-" if value is None else f"{value:.4g}"


def _body(one: CheckpointStatistics, names: str | None) -> StatisticsBody:
    chosen = [tensor for tensor in one.tensors.values() if names is None or fnmatchcase(tensor.name, names)]
    return StatisticsBody(
        checkpoint=one.checkpoint.id, step=one.checkpoint.step, tensors=chosen, missing=list(one.missing)
    )


def _blocks(bodies: Sequence[StatisticsBody], one: bool) -> Iterator[Block]:
    if one:
        yield _table("TENSOR", [(tensor.name, tensor) for tensor in bodies[0].tensors])
    else:
        names = dict.fromkeys(tensor.name for body in bodies for tensor in body.tensors)
        if len(names) > _TABLES:
            yield _summary(bodies)
        else:
            for name in names:
                rows = [(f"{body.step:,}", t) for body in bodies for t in body.tensors if t.name == name]
                yield name
                yield _table(">STEP", rows)
                yield ""
    for body in bodies:
        yield from (f"{body.checkpoint}: {text}" for text in body.missing)


def _table(first: str, tensors: Sequence[tuple[str, TensorStatistics]]) -> Table:
    rows = [
        Row(
            (name, number(t.minimum), number(t.maximum), f"{t.nan:,}", f"{t.inf:,}", f"{t.elements:,}"),
            "" if t.is_finite else "red",
        )
        for name, t in tensors
    ]
    return Table((first, ">MIN", ">MAX", ">NAN", ">INF", ">ELEMENTS"), rows)


def _summary(bodies: Sequence[StatisticsBody]) -> Table:
    """A row per checkpoint, for many tensors."""
    rows = []
    for body in bodies:
        floats = [tensor for tensor in body.tensors if is_float(tensor.dtype)]
        top = max(floats, key=lambda tensor: tensor.largest, default=None)
        nan, inf = sum(t.nan for t in floats), sum(t.inf for t in floats)
        largest, name = (number(top.largest), top.name) if top is not None else ("-", "")
        cells = (f"{body.step:,}", f"{len(body.tensors):,}", f"{nan:,}", f"{inf:,}", largest, name)
        rows.append(Row(cells, "" if all(t.is_finite for t in floats) else "red"))
    return Table((">STEP", ">TENSORS", ">NAN", ">INF", ">LARGEST", "IN"), rows)


def why(
    session: Session,
    run: Annotated[str, an_argument("A run.", "RUN", autocompletion=run_names)],
) -> None:
    """Find the first checkpoint with NaN or Inf, or with a tensor that left its range.

    Reads the statistics of all checkpoints of the run, not their data. With -o id it prints the checkpoint.
    """
    steps, skipped = series(session.source, run, session.source.checkpoints(check_run(run)))
    found = first_trouble(run, steps, skipped)
    session.screen.emit(found, [found.checkpoint] if found.checkpoint else [], _trouble_blocks(found))


def _trouble_blocks(found: RunFinding) -> Iterator[Block]:
    if found.checkpoint is None:
        yield f"Nothing is wrong in the statistics of {found.num_checkpoints:,} checkpoints of run {found.run}"
        return
    yield {
        "first wrong": found.checkpoint,
        "before": found.before or "none",
        "after": found.after or "none",
        "tensors": f"{found.num_tensors:,} went wrong in this checkpoint",
    }
    yield ""
    rows = [
        (one.tensor, _largest(one.before), _largest(one.found), _largest(one.after), one.text)
        for one in found.tensors[:_SHOWN]
    ]
    yield Table(("TENSOR", ">LARGEST BEFORE/2", ">HERE/1", ">AFTER/3", "CAUSE"), rows)
    if found.num_tensors > _SHOWN:
        yield f"... and {found.num_tensors - _SHOWN:,} more: -o json"


def _largest(tensor: TensorStatistics | None) -> str:
    if tensor is None:
        return "-"
    return number(tensor.largest) + ("" if tensor.is_finite else " !")
