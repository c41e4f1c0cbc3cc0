from __future__ import annotations

from ckptd.pages.curves import SAVE_SECONDS, WRITERS, stored_curves
from ckptd.pages.queries import RunPageQuery
from ckptd.pages.runs import run_view
from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.names import Attempt
from tests.support.waiting import present

_ULID = "01HF7YAT00ABCDEFGHJKMNPQRS"


def _checkpoint(step: int, state: State = State.COMMITTED, **metrics: float) -> Checkpoint:
    return Checkpoint("gpt", Attempt(step, _ULID), state, committed_at=step, stored_bytes=10, metrics=metrics)


def test_a_plot_has_other_metrics_and_another_run() -> None:
    own = [_checkpoint(step, loss=1.0 / step, val=2.0 / step) for step in (3, 2, 1)]
    other = [_checkpoint(step, loss=3.0 / step) for step in (2, 1)]
    query = RunPageQuery(metric="loss", also=("val", "none", "loss"), other="gpt-b", log=True)
    view = run_view(own, query, 10.0, {"gpt-b": other})
    assert view.curves.chart is not None
    assert [len(line.marks) for line in view.curves.chart.lines] == [3, 3, 2]
    assert view.curves.names == ("loss", "val", "loss of gpt-b")
    assert "also=val&other=gpt-b&log=1" in view.query.link(page=2)
    assert view.chips == ("loss", "val", "save seconds", "size")


def test_stored_bytes_add_up_over_time() -> None:
    view = run_view([_checkpoint(step) for step in (30, 20, 10)], RunPageQuery(), 40.0)
    stored, saves = (curves.chart.lines[0].marks for curves in view.over_time if curves.chart is not None)
    assert [mark.title.partition(": ")[2] for mark in stored] == [f"{total} B (committed)" for total in (10, 20, 30)]
    assert [WRITERS[SAVE_SECONDS](seconds) for seconds in (0, 0.05, 0.1, 75)] == ["0s", "0.05s", "0.1s", "1m 15s"]
    assert [mark.link for mark in saves] == [mark.link for mark in stored]
    assert run_view([_checkpoint(1)], RunPageQuery(), 40.0).over_time == ()


def test_bytes_of_a_store_rise_in_steps_also_by_group() -> None:
    rows = [("s/a", 3600.0, 10.0), ("t", 7200.0, 5.0), ("s/b", 7200.0, 20.0)]
    curves = stored_curves(rows, ("s",), 9000.0)
    assert curves.names == ("all runs", "s")
    every, group = ([mark.title for mark in line.marks] for line in present(curves.chart).lines)
    assert [title.partition(": ")[2] for title in every] == [f"{size} B" for size in (0, 10, 10, 15, 15, 35)]
    assert group == [
        "1h 30m ago: 0 B of s", "1h 30m ago: 10 B of s", "30m ago: 10 B of s", "30m ago: 30 B of s",
    ]  # fmt: skip
