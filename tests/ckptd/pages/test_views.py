"""The views of the pages: geometry and choices, without a daemon."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptapi.bodies import EntryBody, Phase, ShardBody
from ckptd.index import RankProgress, Restore, RunSummary
from ckptd.pages.branches import branches
from ckptd.pages.charts import bars
from ckptd.pages.contents import contents_view
from ckptd.pages.curves import SIZE
from ckptd.pages.overview import chosen_runs, progress, run_row
from ckptd.pages.queries import RunOrder, RunPageQuery
from ckptd.pages.restores import session_view
from ckptd.pages.runs import PAGE_ROWS, run_view
from ckptd.pages.sessions import LIFETIME_S, Sessions
from ckptd.services.restores import RestoreView
from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.commits.goodput import Beat, Life, account
from ckptstore.format.records import Ended, Origin, Policy
from ckptstore.names import Attempt
from ckptstore.retention.policy import evaluate

_ULID = "01HF7YAT00ABCDEFGHJKMNPQRS"


def _checkpoint(step: int, state: State = State.COMMITTED, **metrics: float) -> Checkpoint:
    return Checkpoint("gpt", Attempt(step, _ULID), state, committed_at=step, stored_bytes=10, metrics=metrics)


@pytest.mark.parametrize("world_size", [1, 7, 128, 129, 4096])
def test_bars_stand_for_all_ranks(world_size: int) -> None:
    drawn = bars([rank % 5 for rank in range(world_size)], "rank", str)
    assert len(drawn.bars) <= 128
    assert drawn.bars[-1].title.split(":")[0].endswith(str(world_size - 1))
    assert all(0 <= bar.mean <= bar.largest <= drawn.bottom for bar in drawn.bars)
    assert all(drawn.left <= bar.x and bar.x + bar.width <= drawn.right for bar in drawn.bars)


def test_a_view_of_a_run_filters_pages_and_shows_reasons() -> None:
    checkpoints = [_checkpoint(step, loss=1 / (step + 1)) for step in range(120, 0, -1)]
    checkpoints[3] = _checkpoint(117, State.CORRUPT)
    kept = evaluate(Policy(keep_last=2), checkpoints, {}, 0.0)
    reasons = {verdict.checkpoint.attempt: verdict.reasons for verdict in kept}
    view = run_view("gpt", checkpoints, reasons, kept, RunPageQuery(page=99, keep=2), 1000.0)
    assert (view.num_pages, view.query.page, len(view.rows)) == (3, 3, 120 - 2 * PAGE_ROWS)
    assert view.query.metric == "loss"
    assert view.preview is not None
    assert (view.preview.num_kept, view.preview.num_removed, view.preview.removed_bytes) == (3, 117, 1170)
    assert view.preview.rules == "--keep 2"
    query = RunPageQuery(keep=5, every=100, best="loss:min:2")
    assert query.policy == Policy(keep_last=5, keep_every=100, keep_best=("loss:min:2",))
    assert query.link() == "?keep=5&every=100&best=loss%3Amin%3A2"
    fewer = RunPageQuery(keep=5, abandoned=0)
    assert fewer.policy == Policy(keep_last=5, keep_abandoned_s=0.0)
    assert fewer.link() == "?keep=5&abandoned=0"
    preview = run_view("gpt", checkpoints, reasons, kept, fewer, 1000.0).preview
    assert preview is not None
    assert preview.rules == "--keep 5 --keep-abandoned 0d"
    healthy = RunPageQuery(keep=5, healthy=True)
    assert healthy.policy == Policy(keep_last=5, keep_healthy=1)
    assert healthy.link() == "?keep=5&healthy=1"
    preview = run_view("gpt", checkpoints, reasons, kept, healthy, 1000.0).preview
    assert preview is not None
    assert preview.rules == "--keep 5 --keep-healthy"
    both = run_view("gpt", checkpoints, reasons, kept, query, 1000.0).preview
    assert both is not None
    assert both.rules == "--keep 5 --keep-every 100 --keep-best loss:min:2"
    only = run_view("gpt", checkpoints, reasons, None, RunPageQuery(state=State.CORRUPT, metric=SIZE), 1000.0)
    assert [(row.checkpoint.step, row.reasons) for row in only.rows] == [(117, ("corrupt",))]
    assert only.curves.chart is not None
    assert only.curves.chart.y_ticks[0].label == "0 B"
    assert only.query.link(page=2) == "?metric=size&state=corrupt&page=2"
    none = run_view("gpt", checkpoints, None, None, RunPageQuery(min_step=500), 1000.0)
    assert (none.rows, none.curves.chart) == ((), None)


def test_contents_of_many_ranks_are_summed_by_rank_and_item() -> None:
    shards = [
        ShardBody(name=f"shard-{rank:05d}.ckpt", rank=rank, num_chunks=1, num_entries=1, raw_bytes=2, stored_bytes=rank)
        for rank in range(1000)
    ]
    entries = [
        EntryBody(name=f"{item}/w{i}", dtype="uint8", shape=[i], num_slices=1, raw_bytes=i)
        for item in ("model", "optim")
        for i in range(40)
    ]
    view = contents_view(4096, shards, entries)
    assert (view.num_writers, view.num_shards, len(view.shards)) == (999, 1000, 32)
    assert view.most is not None
    assert view.most.rank == 999
    assert [(item.name, item.num_entries, item.raw_bytes) for item in view.items] == [
        ("model", 40, 780),
        ("optim", 40, 780),
    ]
    assert [entry.raw_bytes for entry in view.entries[:3]] == [39, 39, 38]
    assert (len(view.entries), view.num_entries) == (50, 80)
    assert contents_view(2**40, shards, entries).num_writers == 999


def _session(world_size: int, ranks: list[RankProgress], **of: object) -> RestoreView:
    restore = Restore(
        id=_ULID, run="gpt", key="k", checkpoint=_checkpoint(1), world_size=world_size, ttl_s=60, created_at=10,
        lease=None, lease_until=0, num_joined=len(ranks),
    )  # fmt: skip
    return RestoreView(restore=restore, expires_at=70.0, ranks=tuple(ranks), **of)  # type: ignore[arg-type]


def test_a_session_shows_first_who_failed_then_who_is_behind() -> None:
    ranks = [
        RankProgress(0, Phase.RESTORED, 10, 10, 19),
        RankProgress(1, Phase.FETCHING, 9, 10, 19),
        RankProgress(2, Phase.FETCHING, 5, 10, 19),
        RankProgress(3, Phase.FAILED, 8, 10, 19, "no"),
    ]
    view = session_view(_session(5, ranks, progress=0.5, stragglers=(1, 4)), 20.0)
    assert [row.progress.rank for row in view.rows] == [3, 1, 2, 0]
    assert [cell.kind for cell in view.cells] == ["restored", "fetching", "fetching", "failed", "absent"]
    assert view.phases == (("absent", 1), ("failed", 1), ("fetching", 2), ("restored", 1))
    assert (view.done, view.took_s) == (0.5, 10.0)


def test_cells_of_thousands_of_ranks_are_of_the_kind_of_the_least_advanced() -> None:
    ranks = [RankProgress(rank, Phase.RESTORED, 1, 1, 19) for rank in range(4096) if rank != 70]
    ranks.append(RankProgress(70, Phase.PLANNING, 0, 1, 19))
    view = session_view(_session(4096, sorted(ranks, key=lambda p: p.rank)), 20.0)
    assert (view.joined_cells, len(view.cells)) == (7, 586)
    assert [i for i, cell in enumerate(view.cells) if cell.kind != "restored"] == [10]
    assert view.cells[10].kind == "planning"
    assert view.num_hidden == 4096 - len(view.rows)


def test_logins_end_by_themselves() -> None:
    now = [1000.0]
    sessions = Sessions(lambda: now[0])
    id = sessions.begin("token")
    now[0] += LIFETIME_S - 1
    assert sessions.secret_of(id) == "token"
    now[0] += 1
    assert sessions.secret_of(id) is None
    now[0] -= 10
    assert sessions.secret_of(id) is None
    other = sessions.begin("token")
    sessions.end(other)
    assert sessions.secret_of(other) is None


def _commits(*times: float) -> list[Checkpoint]:
    """Newest first."""
    return [_checkpoint(int(at)) for at in reversed(times)]


@pytest.mark.parametrize(
    ("now", "uploads", "stalled"),
    [(1300.0, 0, True), (520.0, 0, False), (1300.0, 1, False), (100_000.0, 0, False)],
    ids=["overdue", "in time", "saving", "long ago"],
)
def test_a_run_whose_next_commit_is_overdue_is_stalled(now: float, uploads: int, stalled: bool) -> None:
    recent = _commits(100, 200, 300, 400, 500)
    going = progress(recent, uploads, None, now)
    assert bool(going.stalled) == stalled
    if stalled:
        assert going.stalled == "no commit for 13m; the usual gap is 1m 40s"


def test_two_commits_have_no_usual_gap() -> None:
    recent = _commits(100, 200)
    assert progress(recent, 0, None, 9000.0).stalled == ""


def test_a_run_has_the_end_and_the_origin_of_its_last_attempt() -> None:
    lives = [
        Life(str(at), at, at, 0.0, None, 0, [Beat(at + 1, 7)], Ended.DIED, at + 2, origin=Origin(user="ada", host=host))
        for at, host in ((100.0, "node-1"), (200.0, "node-2"))
    ]
    recent = _commits(100, 200, 300, 400, 500)
    going = progress(recent, 0, account("gpt", lives, 9000.0, 300.0), 9000.0)
    assert (going.origin, going.ended, going.stalled) == ("ada@node-2", "died", "")
    row = run_row(RunSummary("gpt", 5, 50, recent[0]), recent, 0, 0, None, 600.0)
    assert (row.progress.origin, row.progress.ended, row.age_s) == ("", "", 100.0)


def test_runs_are_found_by_name_and_tag_and_sorted() -> None:
    def summary(name: str, number: int, at: int, **tags: str) -> RunSummary:
        latest = replace(_checkpoint(at), tags=tags)
        return RunSummary(name, number, number * 10, latest)

    runs = [summary("bert", 3, 100, owner="Ann"), summary("gpt-a", 1, 300, paper=""), summary("gpt-b", 2, 200)]

    def names(text: str = "", order: RunOrder = RunOrder.NAME) -> list[str]:
        return [found.run for found in chosen_runs(runs, text, order, {"bert": bert})]

    life = Life(
        "a", 1.0, 1.0, 0.0, None, 0, [], Ended.NOT, 1.0, origin=Origin(user="ada", host="node-3", job="slurm 7")
    )
    bert = account("bert", [life], 2.0, 300.0)
    assert names("GPT") == ["gpt-a", "gpt-b"]
    assert names("owner=ann") == ["bert"]
    assert names("paper") == ["gpt-a"]
    assert names("none") == []
    assert names("ADA@node") == names("slurm 7") == ["bert"]
    assert names(order=RunOrder.NEWEST) == ["gpt-a", "gpt-b", "bert"]
    assert names(order=RunOrder.LARGEST) == names(order=RunOrder.MOST) == ["bert", "gpt-b", "gpt-a"]


def test_a_plot_has_other_metrics_and_another_run() -> None:
    own = [_checkpoint(step, loss=1.0 / step, val=2.0 / step) for step in (3, 2, 1)]
    other = [_checkpoint(step, loss=3.0 / step) for step in (2, 1)]
    query = RunPageQuery(metric="loss", also=("val", "none", "loss"), other="gpt-b", log=True)
    view = run_view("gpt", own, None, None, query, 10.0, other)
    assert view.curves.chart is not None
    assert [len(line.marks) for line in view.curves.chart.lines] == [3, 3, 2]
    assert view.curves.names == ("loss", "val", "loss of gpt-b")
    assert "also=val&other=gpt-b&log=1" in view.query.link(page=2)
    assert view.chips == ("loss", "val", "save seconds", "size")


def test_a_metric_is_added_to_the_plot_and_removed_again() -> None:
    query = RunPageQuery(metric="a")
    assert query.toggled("a") == "?metric=a"
    assert query.toggled("b") == "?metric=a&also=b"
    query = RunPageQuery(metric="a", also=("b", "c", "d", "e"), other="run")
    assert query.toggled("a") == "?metric=b&also=c&also=d&also=e&other=run"
    assert query.toggled("f") == "?metric=a&also=b&also=c&also=d&also=f&other=run"
    assert (query.values("also"), query.values("other"), query.values("state")) == (["b", "c", "d", "e"], ["run"], [])


def test_stored_bytes_add_up_over_time() -> None:
    view = run_view("gpt", [_checkpoint(step) for step in (30, 20, 10)], None, None, RunPageQuery(), 40.0)
    stored, saves = (curves.chart.lines[0].marks for curves in view.over_time if curves.chart is not None)
    totals = [mark.title.partition(": ")[2] for mark in stored]
    assert totals == [f"{total} B (committed)" for total in (10, 20, 30)]
    assert [mark.link for mark in saves] == [mark.link for mark in stored]
    assert run_view("gpt", [_checkpoint(1)], None, None, RunPageQuery(), 40.0).over_time == ()


def test_branches_begin_at_the_checkpoint_that_they_continue_from() -> None:
    first = [Checkpoint("gpt", Attempt(step, _ULID), State.COMMITTED) for step in (0, 100, 200)]
    first[2] = replace(first[2], state=State.ABANDONED)
    gone = Attempt(220, _ULID)
    second = [
        Checkpoint("gpt", Attempt(step, _ULID, generation=4), State.COMMITTED, parent=first[1].attempt)
        for step in (150, 250)
    ]
    drawn = run_view("gpt", [*second[::-1], *first[::-1]], None, None, RunPageQuery(), 10.0).branches
    assert drawn is not None
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
    assert run_view("gpt", first, None, None, RunPageQuery(), 10.0).branches is None


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
