from __future__ import annotations

import pytest

from ckptd.pages.timeline import MOST_ROWS, timeline
from ckptstore.analysis.goodput import Account, Spent, account, lives_of
from ckptstore.run import Run
from ckptstore.stores import open_store
from tests.support.checkpoints import SMALL, write_checkpoint
from tests.support.histories import History


def _account(num_lives: int = 6) -> Account:
    history, run = History(3, num_lives), Run(open_store("memory://timeline"), "sim")
    return account("sim", lives_of(history.heartbeats(run), (), ()), history.now)


def test_bars_follow_time_and_leave_gaps() -> None:
    found = _account()
    line = timeline(found, [])
    rows = line.rows
    assert [row.number for row in rows] == [1, 2, 3, 4, 5, 6]
    width, drawn = line.right - line.left, dict.fromkeys(Spent, 0.0)
    for row in rows:
        for one, other in zip(row.spans, row.spans[1:], strict=False):
            assert other.x == pytest.approx(one.x + one.width, abs=0.02)
        for span in row.spans:
            assert line.left <= span.x <= span.x + span.width <= line.right + 0.02
            drawn[Spent(span.kind)] += span.width
    total = found.until - found.began_at
    assert drawn[Spent.LOST] / width == pytest.approx(found.seconds["lost"] / total, abs=0.01)
    assert drawn[Spent.PRODUCTIVE] / width == pytest.approx(found.seconds["productive"] / total, abs=0.01)


def test_checkpoints_are_marked_in_the_row_of_their_generation() -> None:
    found, store = _account(), open_store("memory://timeline-marks")
    third = found.attempts[2]
    assert third.generation is not None
    middle = (third.trains_at + third.ended_at) / 2
    written = write_checkpoint(store, "sim", 7, SMALL, clock=lambda: middle, generation=third.generation)
    rows = timeline(found, [written]).rows
    assert [len(row.saves) for row in rows] == [0, 0, 1, 0, 0, 0]
    (mark,) = rows[2].saves
    assert rows[2].spans[0].x < mark.x < rows[2].spans[-1].x + rows[2].spans[-1].width
    assert mark.title.startswith("step 7, durable after")


def test_only_the_newest_attempts_are_drawn() -> None:
    rows = timeline(_account(MOST_ROWS + 5), []).rows
    assert [row.number for row in rows] == list(range(6, MOST_ROWS + 6))
