"""Overlap under process groups: every rank stores the state of the save, and what the guard cannot rest on there."""

from __future__ import annotations

import pytest

from tests.support.parallel.runner import Outcome, Scenario, run_scenarios

_LAYOUTS = ("ddp", "fsdp2", "fsdp1")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    folder = tmp_path_factory.mktemp("overlap")
    scenarios = {
        layout: Scenario(
            "tests.ckpt.snapshot.overlapping:stored_alike", 2, {"store": str(folder / layout), "layout": layout}
        )
        for layout in _LAYOUTS
    }
    scenarios["counters"] = Scenario("tests.ckpt.snapshot.overlapping:version_counters", 2, {"kind": "fsdp2"})
    arguments = {"store": str(folder / "changed")}
    scenarios["changed"] = Scenario("tests.ckpt.snapshot.overlapping:change_on_both_ranks", 2, arguments)
    (folder / "ranks").mkdir()
    return dict(zip(scenarios, run_scenarios(list(scenarios.values()), folder / "ranks"), strict=True))


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_ranks_store_the_state_of_the_save(outcomes: dict[str, Outcome], layout: str) -> None:
    for rank, result in enumerate(outcomes[layout].result()):
        assert result["alike"] == [True] * 3
        assert result["copies"] == (0 if layout == "ddp" and rank else 3)  # replicas are written by rank 0


def test_version_counters_of_shards_do_not_tell_of_steps(outcomes: dict[str, Outcome]) -> None:
    for result in outcomes["counters"].result():
        assert [what for what, holds in result.items() if not holds] == []


def test_ranks_that_change_their_weights_commit_no_two_moments_in_one_checkpoint(outcomes: dict[str, Outcome]) -> None:
    torn, other = outcomes["changed"].result()
    assert torn["code"] == "snapshot_torn"
    assert "model/" in torn["said"]
    assert other["code"] == "rank_failed"
    for result in (torn, other):
        assert sorted(result["steps"]) == [1, 3]
        assert set(map(tuple, result["values"].values())) == {(0.5,)}
