"""What reports mean: pure rules, no clock, no database."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptapi.bodies import Phase, RankReport, RestoreState
from ckptd.index import RankProgress, Restore
from ckptd.services import progress
from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.names import Attempt

_ULID = "01M7Y6P7WGCXV53EY39EPJ6JT8"
_BEGAN = 1000.0


def _restore(world_size: int = 4, ttl_s: float = 100) -> Restore:
    checkpoint = Checkpoint("gpt", Attempt(10, _ULID), State.COMMITTED)
    return Restore(
        id=_ULID,
        run="gpt",
        key="job-1",
        checkpoint=checkpoint,
        world_size=world_size,
        ttl_s=ttl_s,
        created_at=_BEGAN,
        lease=None,
        lease_until=0,
    )


def _fetching(rank: int, done: int, reported_at: float = _BEGAN) -> RankProgress:
    return RankProgress(rank, Phase.FETCHING, done, 100, reported_at)


def _restored(rank: int, reported_at: float = _BEGAN) -> RankProgress:
    return RankProgress(rank, Phase.RESTORED, 100, 100, reported_at)


def test_the_last_rank_to_be_restored_ends_the_session() -> None:
    restore = _restore(2)
    restore, first = progress.advance(restore, None, 0, RankReport(phase=Phase.RESTORED, done_bytes=7), 1001)
    assert (restore.state, restore.num_joined, restore.num_restored) == (RestoreState.RESTORING, 1, 1)
    again, same = progress.advance(restore, first, 0, RankReport(phase=Phase.RESTORED, done_bytes=7), 1002)
    assert (again.num_restored, again.done_bytes, same) == (1, 7, replace(first, reported_at=1002) if first else None)
    restore, _ = progress.advance(again, None, 1, RankReport(phase=Phase.RESTORED), 1003)
    assert (restore.state, restore.ended_at, restore.problem) == (RestoreState.RESTORED, 1003, "")


def test_a_late_report_does_not_undo_that_a_rank_is_restored() -> None:
    restore, said = progress.advance(_restore(2), None, 0, RankReport(phase=Phase.RESTORED, done_bytes=9), 1001)
    restore, said = progress.advance(restore, said, 0, RankReport(phase=Phase.FETCHING, done_bytes=5), 1002)
    assert said is not None
    assert (said.phase, said.done_bytes, said.reported_at, restore.num_restored) == (Phase.RESTORED, 9, 1002, 1)


def test_a_restored_rank_can_still_fail() -> None:
    restore, said = progress.advance(_restore(2), None, 0, RankReport(phase=Phase.RESTORED), 1001)
    restore, said = progress.advance(restore, said, 0, RankReport(phase=Phase.FAILED, problem="out of memory"), 1002)
    assert (restore.state, restore.problem, restore.num_restored) == (
        RestoreState.FAILED,
        "rank 0 failed: out of memory",
        0,
    )


@pytest.mark.parametrize("state", [state for state in RestoreState if state is not RestoreState.RESTORING])
def test_what_has_ended_never_changes(state: RestoreState) -> None:
    ended = replace(_restore(1), state=state, ended_at=1001)
    before = _fetching(0, 50)
    for phase in Phase:
        assert progress.advance(ended, before, 0, RankReport(phase=phase), 1002) == (ended, before)
    assert progress.join(ended, None, 0, 1002) == (ended, None)


def test_a_long_problem_is_cut_and_a_missing_one_named() -> None:
    long = RankReport(phase=Phase.FAILED, problem="x\0" * 5000)
    restore, said = progress.advance(_restore(), None, 3, long, 1001)
    assert said is not None
    assert (len(said.problem), "\0" in said.problem, len(restore.problem) < 1100) == (1000, False, True)
    restore, _ = progress.advance(_restore(), None, 3, RankReport(phase=Phase.FAILED), 1001)
    assert restore.problem == "rank 3 failed: it gave no reason"


_REPORTS = st.builds(
    RankReport,
    phase=st.sampled_from([phase for phase in Phase if phase is not Phase.FAILED]),
    done_bytes=st.integers(0, 1000),
    total_bytes=st.integers(0, 1000),
)


@given(st.lists(st.tuples(st.integers(0, 3), _REPORTS), max_size=40))
def test_sums_are_those_of_the_ranks(reports: list[tuple[int, RankReport]]) -> None:
    restore, ranks = _restore(4), dict[int, RankProgress]()
    for now, (rank, report) in enumerate(reports):
        restore, said = progress.advance(restore, ranks.get(rank), rank, report, float(now))
        assert said is not None or not restore.live
        if said is not None:
            ranks[rank] = said
    restored = [said for said in ranks.values() if said.phase is Phase.RESTORED]
    assert (restore.num_joined, restore.num_restored) == (len(ranks), len(restored))
    assert restore.done_bytes == sum(said.done_bytes for said in ranks.values())
    assert restore.total_bytes == sum(said.total_bytes for said in ranks.values())
    assert (restore.state is RestoreState.RESTORED) == (len(restored) == 4)


def test_a_rank_below_half_of_the_median_is_behind() -> None:
    ranks = [_fetching(0, 80), _fetching(1, 39), _fetching(2, 41), _fetching(3, 80), _fetching(4, 90)]
    assert progress.stragglers(_restore(5), ranks, _BEGAN) == [1]
    assert progress.slowest(ranks) == ranks[1]


def test_no_rank_is_behind_before_one_has_begun() -> None:
    assert progress.stragglers(_restore(2), [RankProgress(0, Phase.PLANNING, 0, 0, _BEGAN)], _BEGAN) == []
    assert progress.stragglers(_restore(2), [], _BEGAN) == []


def test_a_rank_that_is_silent_for_a_quarter_of_the_time_is_behind() -> None:
    ranks = [_fetching(0, 50, reported_at=_BEGAN + 30), _fetching(1, 50, reported_at=_BEGAN + 4)]
    assert progress.stragglers(_restore(2), ranks, _BEGAN + 29) == []
    assert progress.stragglers(_restore(2), ranks, _BEGAN + 30) == [1]
    assert progress.stragglers(_restore(2), [_restored(0), ranks[1]], _BEGAN + 30) == [1]


def test_ranks_that_never_joined_are_behind_as_soon_as_most_have_done_something() -> None:
    ranks = [_restored(0), _fetching(2, 60), _restored(3)]
    assert progress.stragglers(_restore(5), ranks, _BEGAN) == [1, 4]
    assert progress.stragglers(_restore(6), ranks[:2], _BEGAN) == []  # most of them have done nothing
    assert progress.stragglers(_restore(2), ranks[:1], _BEGAN) == [1]
    assert progress.stragglers(_restore(6), ranks[:2], _BEGAN + 26) == [1, 2, 3, 4, 5]
    assert len(progress.stragglers(_restore(1 << 20), ranks, _BEGAN + 26)) == progress.MAX_STRAGGLERS


def test_ended_sessions_have_no_stragglers() -> None:
    ended = replace(_restore(2), state=RestoreState.FAILED)
    assert progress.stragglers(ended, [_fetching(0, 90)], _BEGAN + 1000) == []


def test_silence_names_ranks_and_where_they_were() -> None:
    ranks = [_restored(0), _fetching(1, 50, reported_at=_BEGAN + 1), _fetching(2, 60, reported_at=_BEGAN + 60)]
    restore = _restore(4)
    assert progress.silence(restore, ranks, _BEGAN + 99, since=0) == ""
    said = progress.silence(restore, ranks, _BEGAN + 101, since=0)
    assert said == "no report for 100 s from rank 1 (fetching), rank 3 (never joined)"
    assert progress.silence(restore, ranks, _BEGAN + 101, since=_BEGAN + 2) == ""


def test_a_silent_crowd_is_counted() -> None:
    said = progress.silence(_restore(1 << 20), [], _BEGAN + 100, since=0)
    assert said.count("(never joined)") == 16
    assert said.endswith(f" and {(1 << 20) - 16} more")


def test_progress_is_a_mean_over_all_ranks() -> None:
    ranks = [_restored(0), _fetching(1, 50), RankProgress(2, Phase.FETCHING, 500, 100, _BEGAN)]
    assert progress.mean(_restore(5), ranks) == pytest.approx(0.5)
