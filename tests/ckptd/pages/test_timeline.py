from __future__ import annotations

import pytest

from ckptd.pages.timeline import MOST_ROWS, goodput_view
from ckptstore.analysis.goodput import SILENT_S, Account, Spent, account, lives_of
from ckptstore.run import Run
from ckptstore.stores import open_store
from tests.support.checkpoints import SMALL, write_checkpoint
from tests.support.histories import History


def _account(num_lives: int = 6) -> Account:
    history, run = History(3, num_lives), Run(open_store("memory://timeline"), "sim")
    return account("sim", lives_of(history.heartbeats(run), (), ()), history.now, SILENT_S)


def test_bars_follow_time_and_leave_gaps() -> None:
    found = _account()
    view = goodput_view(found, [])
    assert sum(part.share for part in view.parts) == pytest.approx(1)
    assert [part.kind for part in view.parts] == list(Spent)
    rows = view.timeline.rows
    assert [row.number for row in rows] == [1, 2, 3, 4, 5, 6]
    width, drawn = view.timeline.right - view.timeline.left, dict.fromkeys(Spent, 0.0)
    for row in rows:
        for one, other in zip(row.spans, row.spans[1:], strict=False):
            assert other.x == pytest.approx(one.x + one.width, abs=0.02)
        for span in row.spans:
            assert view.timeline.left <= span.x <= span.x + span.width <= view.timeline.right + 0.02
            drawn[Spent(span.kind)] += span.width
    total = found.until - found.began_at
    assert drawn[Spent.LOST] / width == pytest.approx(found.seconds["lost"] / total, abs=0.01)
    assert drawn[Spent.PRODUCTIVE] / width == pytest.approx(found.seconds["productive"] / total, abs=0.01)
    assert [number for number, _ in view.attempts] == [6, 5, 4, 3, 2, 1], "the newest first"


def test_checkpoints_are_marked_in_the_row_of_their_generation() -> None:
    found, store = _account(), open_store("memory://timeline-marks")
    third = found.attempts[2]
    assert third.generation is not None
    middle = (third.trains_at + third.ended_at) / 2
    written = write_checkpoint(store, "sim", 7, SMALL, clock=lambda: middle, generation=third.generation)
    rows = goodput_view(found, [written]).timeline.rows
    assert [len(row.saves) for row in rows] == [0, 0, 1, 0, 0, 0]
    (mark,) = rows[2].saves
    assert rows[2].spans[0].x < mark.x < rows[2].spans[-1].x + rows[2].spans[-1].width
    assert mark.title.startswith("step 7, durable after")


def test_only_the_newest_attempts_are_drawn() -> None:
    view = goodput_view(_account(MOST_ROWS + 5), [])
    assert [row.number for row in view.timeline.rows] == list(range(6, MOST_ROWS + 6))
    assert len(view.attempts) == MOST_ROWS + 5
