"""Views of restore sessions: progress and stragglers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ckptapi.bodies import Phase, RankBody, RestoreBody
from ckptstore import human

_CELL = 18.0
_STEP = 21.0
_COLUMNS = 40
_MAX_CELLS = 640
_ROWS_SHOWN = 64
_ORDER = (Phase.FAILED, *(phase for phase in Phase if phase is not Phase.FAILED))
"""Phases, the least advanced first."""
ABSENT = "absent"
"""The kind of a rank that has not joined."""


class Cell(NamedTuple):
    """One square of a grid, for one item or several adjacent ones."""

    x: float
    y: float
    title: str
    kind: str
    filled: float
    """From 0 to the size of the square."""


class SessionView(NamedTuple):
    """The ranks of one session."""

    width: float
    height: float
    cells: tuple[Cell, ...]
    joined_cells: int
    """Number of ranks per cell."""
    phases: tuple[tuple[str, int], ...]
    rows: tuple[RankBody, ...]
    """Stragglers and the least advanced ranks first."""


def session_view(view: RestoreBody) -> SessionView:
    """The ranks of one session."""
    ranks = view.ranks or ()
    known = {progress.rank: progress for progress in ranks}
    group = -(-view.world_size // _MAX_CELLS) or 1
    spans = [range(at, min(at + group, view.world_size)) for at in range(0, view.world_size, group)]
    cells = [_cell(i, span, known) for i, span in enumerate(spans)]
    columns = min(_COLUMNS, len(cells))
    behind = set(view.stragglers)
    rows = sorted(ranks, key=lambda p: (p.phase is not Phase.FAILED, p.rank not in behind, p.fraction, p.rank))
    return SessionView(
        width=columns * _STEP,
        height=-(-len(cells) // _COLUMNS) * _STEP,
        cells=tuple(cells),
        joined_cells=group,
        phases=_phases(view.world_size, ranks),
        rows=tuple(rows[:_ROWS_SHOWN]),
    )


def _cell(at: int, span: range, known: dict[int, RankBody]) -> Cell:
    """A cell, of the kind of its least advanced rank."""
    joined = [known[rank] for rank in span if rank in known]
    done = sum(progress.fraction for progress in joined) / len(span)
    failed = any(progress.phase is Phase.FAILED for progress in joined)
    if len(joined) < len(span) and not failed:
        kind = ABSENT
    else:
        kind = str(min((progress.phase for progress in joined), key=_ORDER.index))
    name = f"rank {span[0]}" if len(span) == 1 else f"ranks {span[0]}–{span[-1]}"
    title = f"{name}: {kind}, {done:.0%}"
    if len(span) == 1 and joined and joined[0].total_bytes:
        title += f", {human.size(joined[0].done_bytes)} of {human.size(joined[0].total_bytes)}"
    row, column = divmod(at, _COLUMNS)
    return Cell(column * _STEP, row * _STEP, title, kind, round(_CELL * done, 1))


def _phases(world_size: int, ranks: Sequence[RankBody]) -> tuple[tuple[str, int], ...]:
    counts = {ABSENT: world_size - len(ranks)}
    for phase in _ORDER:
        counts[phase] = sum(1 for progress in ranks if progress.phase is phase)
    return tuple((str(name), count) for name, count in counts.items() if count)
