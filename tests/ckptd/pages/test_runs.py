from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.index import RunSummary
from ckptd.pages.curves import SIZE
from ckptd.pages.queries import PAGE_ROWS, RunOrder, RunPageQuery
from ckptd.pages.runs import branches, chosen_runs, progress, run_row, run_view
from ckptstore.analysis.goodput import Beat, TrainerRun, account
from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.format.records import Origin, Policy, TrainerEnd
from ckptstore.names import Attempt
from tests.support.waiting import present

_ULID = "01HF7YAT00ABCDEFGHJKMNPQRS"


def _checkpoint(step: int, state: State = State.COMMITTED, **metrics: float) -> Checkpoint:
    return Checkpoint("gpt", Attempt(step, _ULID), state, committed_at=step, stored_bytes=10, metrics=metrics)


def test_a_view_of_a_run_filters_and_pages() -> None:
    checkpoints = [_checkpoint(step, loss=1 / (step + 1)) for step in range(120, 0, -1)]
    checkpoints[3] = _checkpoint(117, State.CORRUPT)
    view = run_view(checkpoints, RunPageQuery(page=99), 1000.0)
    assert (view.num_pages, view.query.page, len(view.rows)) == (3, 3, 120 - 2 * PAGE_ROWS)
    assert view.query.metric == "loss"
    only = run_view(checkpoints, RunPageQuery(state=State.CORRUPT, metric=SIZE), 1000.0)
    assert [row.step for row in only.rows] == [117]
    assert only.curves.chart is not None
    assert only.curves.chart.y_ticks[0].label == "0 B"
    assert only.query.link(page=2) == "?metric=size&state=corrupt&page=2"
    none = run_view(checkpoints, RunPageQuery(min_step=500), 1000.0)
    assert (none.rows, none.curves.chart) == ([], None)


@pytest.mark.parametrize(
    ("query", "policy", "rules", "link"),
    [
        (RunPageQuery(keep=2), Policy(keep_last=2), "--keep 2", "?keep=2"),
        (
            RunPageQuery(keep=5, every=100, best="loss:min:2"),
            Policy(keep_last=5, keep_every=100, keep_best=("loss:min:2",)),
            "--keep 5 --keep-every 100 --keep-best loss:min:2",
            "?keep=5&every=100&best=loss%3Amin%3A2",
        ),
        (
            RunPageQuery(keep=5, abandoned=0),
            Policy(keep_last=5, keep_abandoned_s=0.0),
            "--keep 5 --keep-abandoned 0d",
            "?keep=5&abandoned=0",
        ),
        (
            RunPageQuery(keep=5, healthy=True),
            Policy(keep_last=5, keep_healthy=1),
            "--keep 5 --keep-healthy 1",
            "?keep=5&healthy=1",
        ),
    ],
)
def test_a_preview_has_the_rules_of_its_form(query: RunPageQuery, policy: Policy, rules: str, link: str) -> None:
    assert (query.policy, query.rules, query.link()) == (policy, rules, link)


def _commits(*times: float) -> list[Checkpoint]:
    """Newest first."""
    return [_checkpoint(int(at)) for at in reversed(times)]


@pytest.mark.parametrize(
    ("now", "uploads", "measured", "stalled"),
    [(1300.0, 0, True, True), (520.0, 0, True, False), (1300.0, 1, True, False), (1300.0, 0, False, False)],
    ids=["overdue", "in time", "saving", "without a heartbeat"],
)
def test_a_run_whose_next_commit_is_overdue_is_stalled(now: float, uploads: int, measured: bool, stalled: bool) -> None:
    recent = _commits(100, 200, 300, 400, 500)
    life = TrainerRun("1", 1.0, 1.0, 0.0, None, 0, [Beat(500.0, 7)], TrainerEnd.NOT, 500.0, measured)
    going = progress(recent, uploads, account("gpt", [life], now), now)
    assert bool(going.stalled) == stalled
    assert not progress(recent, uploads, None, now).stalled
    if stalled:
        assert going.stalled == "no commit for 13m; the usual gap is 1m 40s"


def test_two_commits_have_no_usual_gap() -> None:
    assert progress(_commits(100, 200), 0, None, 9000.0).stalled == ""


def test_a_run_has_the_end_and_the_origin_of_its_last_attempt() -> None:
    lives = [
        TrainerRun(
            str(at), at, at, 0.0, None, 0, [Beat(at + 1, 7)], TrainerEnd.DIED, at + 2,
            origin=Origin(user="ada", host=host),
        )
        for at, host in ((100.0, "node-1"), (200.0, "node-2"))
    ]  # fmt: skip
    recent = _commits(100, 200, 300, 400, 500)
    going = progress(recent, 0, account("gpt", lives, 9000.0), 9000.0)
    assert (going.origin, going.ended, going.stalled) == ("ada@node-2", "died", "")
    row = run_row(RunSummary("gpt", 5, 50, recent[0]), recent, 0, 0, None, 600.0)
    assert (row.progress.origin, row.progress.ended) == ("", "")


def test_runs_are_found_by_name_and_tag_and_sorted() -> None:
    def summary(name: str, number: int, at: int, **tags: str) -> RunSummary:
        latest = replace(_checkpoint(at), tags=tags)
        return RunSummary(name, number, number * 10, latest)

    runs = [summary("bert", 3, 100, owner="Ann"), summary("gpt-a", 1, 300, paper=""), summary("gpt-b", 2, 200)]
    runs.append(summary("old", 9, 900, archived=""))

    def names(text: str = "", order: RunOrder = RunOrder.NAME) -> list[str]:
        return [found.run for found in chosen_runs(runs, text, order, {"bert": bert})]

    life = TrainerRun(
        "a", 1.0, 1.0, 0.0, None, 0, [], TrainerEnd.NOT, 1.0, origin=Origin(user="ada", host="node-3", job="slurm 7")
    )
    bert = account("bert", [life], 2.0)
    assert (names("GPT"), names("owner=ann"), names("paper")) == (["gpt-a", "gpt-b"], ["bert"], ["gpt-a"])
    assert (names("none"), names("old")) == ([], ["old"])
    assert names("ADA@node") == names("slurm 7") == ["bert"]
    assert names(order=RunOrder.NEWEST) == ["gpt-a", "gpt-b", "bert"]
    assert names(order=RunOrder.LARGEST) == names(order=RunOrder.MOST) == ["bert", "gpt-b", "gpt-a"]


def test_siblings_that_have_ended_are_one_row() -> None:
    runs = [RunSummary(name, 2, 30, _checkpoint(at)) for at, name in enumerate(("a/x", "s/a", "s/b", "s/c", "t"), 1)]
    life = TrainerRun("a", 1.0, 1.0, 0.0, None, 0, [Beat(90.0, 7)], TrainerEnd.NOT, 90.0)
    alive = {"s/c": account("s/c", [life], 100.0)}
    shown = chosen_runs(runs, "", RunOrder.NAME, alive)
    assert [found.run for found in shown] == ["a/x", "s/", "s/c", "t"]
    assert (shown[1].num_checkpoints, shown[1].stored_bytes, shown[1].latest) == (4, 60, runs[2].latest)
    assert len(chosen_runs(runs, "s/", RunOrder.NAME, alive)) == 3


def test_branches_begin_at_the_checkpoint_that_they_continue_from() -> None:
    first = [Checkpoint("gpt", Attempt(step, _ULID), State.COMMITTED) for step in (0, 100, 200)]
    first[2] = replace(first[2], state=State.ABANDONED)
    gone = Attempt(220, _ULID)
    second = [
        Checkpoint("gpt", Attempt(step, _ULID, generation=4), State.COMMITTED, parent=first[1].attempt)
        for step in (150, 250)
    ]
    drawn = present(run_view([*second[::-1], *first[::-1]], RunPageQuery(), 10.0).branches)
    old, new = drawn.rows
    assert (old.number, new.number, drawn.num_hidden) == (0, 4, 0)
    fork = old.marks[1]
    assert new.line.startswith(f"M{fork.x},{fork.y}C")
    assert new.line.endswith(f"H{new.marks[-1].x}")
    assert old.line.endswith(f"H{old.marks[-1].x}")
    assert [mark.kind for mark in old.marks] == ["committed", "committed", "abandoned"]
    drawn = branches([*(replace(c, parent=gone) for c in second), *first])
    old, new = drawn.rows
    assert old.marks[-1].x < float(old.line.rpartition("H")[2]) == float(new.line[1:].partition(",")[0])
    assert run_view(first, RunPageQuery(), 10.0).branches is None


@given(st.dictionaries(st.integers(0, 40), st.lists(st.integers(0, 10**9), min_size=1, max_size=200), min_size=2))
def test_branches_of_any_run_lie_within_the_drawing(steps: dict[int, list[int]]) -> None:
    checkpoints = [
        Checkpoint("gpt", Attempt(step, _ULID, generation=number), State.COMMITTED)
        for number, own in steps.items()
        for step in own
    ]
    drawn = branches(checkpoints)
    assert len(drawn.rows) + drawn.num_hidden == len(steps)
    for row in drawn.rows:
        assert 1 <= len(row.marks) <= 120
        assert all(drawn.left <= mark.x <= drawn.right and 0 <= mark.y <= drawn.bottom for mark in row.marks)
