"""why: the first checkpoint of a run, and its tensors, that went wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from ckptctl.commands.stats import number, read_series
from ckptctl.completion import run_names
from ckptctl.render import Block, Facts, Row, Table
from ckptctl.session import Session
from ckptstore.analysis.history import RunFinding, TensorFinding, first_trouble
from ckptstore.analysis.statistics import TensorStatistics
from ckptstore.names import check_run

_SHOWN = 12


def why(
    session: Session,
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run.", autocompletion=run_names)],
) -> None:
    """Find the first checkpoint with NaN or Inf, or with a tensor that left its range.

    Reads the statistics of all checkpoints of the run, not their data. With -o id it prints the checkpoint.
    """
    steps, skipped = read_series(session, check_run(run))
    found = first_trouble(run, steps, skipped)
    session.screen.emit(found, [found.checkpoint] if found.checkpoint else [], _blocks(found))


def _blocks(found: RunFinding) -> Iterator[Block]:
    if found.checkpoint is None:
        yield f"Nothing is wrong in the statistics of {found.num_checkpoints:,} checkpoints of run {found.run}"
        return
    facts = [
        ("first wrong", found.checkpoint),
        ("before", found.before or "none"),
        ("after", found.after or "none"),
        ("tensors", f"{found.num_tensors:,} went wrong in this checkpoint"),
    ]
    yield Facts(facts)
    yield ""
    yield _table(found.tensors[:_SHOWN])
    if found.num_tensors > _SHOWN:
        yield f"... and {found.num_tensors - _SHOWN:,} more: -o json"


def _table(findings: list[TensorFinding]) -> Table:
    columns = ("TENSOR", ">LARGEST BEFORE/2", ">HERE/1", ">AFTER/3", "CAUSE")
    rows = [
        Row((one.tensor, _largest(one.before), _largest(one.found), _largest(one.after), one.text)) for one in findings
    ]
    return Table(columns, rows)


def _largest(tensor: TensorStatistics | None) -> str:
    if tensor is None:
        return "-"
    return number(tensor.largest) + ("" if tensor.is_finite else " !")
