"""diff: what differs between two checkpoints, and by how much."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from ckptctl.commands.arguments import a_checkpoint
from ckptctl.commands.stats import number
from ckptctl.render import Block, Row, Table
from ckptctl.session import Session
from ckptstore import human
from ckptstore.analysis.difference import Difference, Side, compare

_SHOWN = 40
_WIDE = 32
"""Characters of a value."""


def diff(
    session: Session,
    before: Annotated[str, a_checkpoint("The earlier checkpoint.")],
    after: Annotated[str, a_checkpoint("The later.")],
) -> None:
    """Compare two checkpoints, also of different runs and numbers of ranks: tensors, and values as a learning rate.

    Chunks that are equal in both are not read. With -o id it prints the names of the tensors that differ.
    """
    found = [session.find_readable(text) for text in (before, after)]
    size = sum(checkpoint.raw_bytes for checkpoint in found)
    with session.leased(*found), session.screen.progress("comparing", size) as progress:
        old, new = (Side.open(session.source, checkpoint) for checkpoint in found)
        result = compare(old, new, progress)
    session.screen.emit(result, result.names, _blocks(result))


def _blocks(result: Difference) -> Iterator[Block]:
    yield {
        "before": result.before,
        "after": result.after,
        "equal": human.count(result.num_equal, "tensor"),
        "read": human.size(result.read_bytes),
    }
    for word, names in (("removed", result.removed), ("added", result.added)):
        for name in names[:_SHOWN]:
            yield f"{word}  {name}"
        if len(names) > _SHOWN:
            yield f"{word}  ... and {len(names) - _SHOWN:,} more"
    for one in result.reshaped[:_SHOWN]:
        yield f"reshaped  {one.name}: {one.dtype_before} {one.before} to {one.dtype_after} {one.after}"
    if result.values:
        yield ""
        values = [(name, old[:_WIDE], new) for name, (old, new) in list(result.values.items())[:_SHOWN]]
        yield Table(("VALUE", "BEFORE", "AFTER"), values)
        if len(result.values) > _SHOWN:
            yield f"... and {len(result.values) - _SHOWN:,} more: -o json"
    if result.changed:
        yield ""
        rows = [
            Row(
                (one.name, number(one.relative_norm), number(one.largest), f"{one.changed:,}", f"{one.not_finite:,}"),
                "red" if one.not_finite else "",
            )
            for one in result.changed[:_SHOWN]
        ]
        yield Table(("CHANGED", ">RELATIVE", ">LARGEST", ">ELEMENTS", ">NAN OR INF"), rows)
        if len(result.changed) > _SHOWN:
            yield f"... and {len(result.changed) - _SHOWN:,} more: -o json"
