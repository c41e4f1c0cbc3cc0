"""The ranks of a restore meet a few times, and an error of one is raised on all."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.parallel.runner import Outcome, Scenario, run_scenarios

_RANKS = "tests.ckpt.restoring.together_ranks:"
_FAILING: dict[str, dict[str, list[Any]]] = {
    "none": {},
    "the earliest step": {"0": [2, "unfit"], "1": [1, "damaged"]},
    "no other checkpoint helps": {"0": [1, "damaged"], "1": [1, "unfit"]},
    "deleted meanwhile": {"0": [2, "deleted"], "1": [1, "damaged"]},
    "unfit before it was deleted": {"0": [2, "deleted"], "1": [1, "unfit"]},
    "a bug": {"1": [0, "bug"]},
    "in the choice": {"0": [3, "damaged"]},
}
_MODES = ("auto", "broadcast")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[object, Outcome]:
    folder = tmp_path_factory.mktemp("together")
    (folder / "ranks").mkdir()
    two, one = ({"store": str(folder / name)} for name in ("two", "one"))
    scenarios: dict[object, Scenario] = {
        "save": Scenario(f"{_RANKS}save", 2, two),
        "save alone": Scenario(f"{_RANKS}save", 1, one),
        "same": Scenario(f"{_RANKS}restore", 2, two | {"replica_reads": "auto"}),
        "other": Scenario(f"{_RANKS}restore", 2, one | {"replica_reads": "auto"}),
        "exchange": Scenario(f"{_RANKS}restore", 2, two | {"replica_reads": "broadcast"}),
    }
    for mode in _MODES:
        scenarios[mode] = Scenario(f"{_RANKS}restore_deleted", 2, {"store": str(folder / mode), "replica_reads": mode})
    for name, failing in _FAILING.items():
        scenarios[name] = Scenario(f"{_RANKS}fail", 2, {"failing": failing})
    return dict(zip(scenarios, run_scenarios(list(scenarios.values()), folder / "ranks"), strict=True))


@pytest.mark.parametrize(
    ("name", "meetings"),
    [
        # Choose, prepare, fetch, place.
        ("same", ["decide"] * 4),
        # The items of all saved ranks are shared out.
        ("other", ["decide"] * 5),
        # Protect the checkpoint; then the manifest goes from rank 0 to all, and so do the ranks' needs, in two.
        ("exchange", ["decide"] * 2 + ["broadcast"] + ["decide"] * 5),
    ],
)
def test_a_restore_meets_a_few_times(outcomes: dict[object, Outcome], name: str, meetings: list[str]) -> None:
    for result in outcomes[name].result():
        assert result == {"meetings": meetings, "values": [7.0] * 3}


def test_all_ranks_get_all_reports_and_what_rank_0_chooses(outcomes: dict[object, Outcome]) -> None:
    for rank, result in enumerate(outcomes["none"].result()):
        assert (result["answers"], result["result"]) == ([[0], [1]], "first")
        assert result["chosen"] == (rank == 0)
        assert result["later"] == [[0, 1], "again"]


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("the earliest step", "corrupt", "damaged on rank 1"),
        ("no other checkpoint helps", "state_mismatch", "unfit on rank 1"),
        ("deleted meanwhile", "no_checkpoint", "deleted on rank 0"),
        ("unfit before it was deleted", "state_mismatch", "unfit on rank 1"),
        ("a bug", "restore_failed", "rank 1 cannot restore: ValueError('bug on rank 1')"),
        ("in the choice", "corrupt", "damaged on rank 0"),
    ],
)
def test_one_error_is_raised_on_all_ranks(outcomes: dict[object, Outcome], name: str, code: str, message: str) -> None:
    for rank, result in enumerate(outcomes[name].result()):
        assert (result["code"], result["message"]) == (code, message)
        assert result["chosen"] == (name == "in the choice" and rank == 0)
        assert result["later"] == [[0, 1], "again"]


@pytest.mark.parametrize("mode", _MODES)
def test_what_a_deleted_checkpoint_lacks_is_not_damage(outcomes: dict[object, Outcome], mode: str) -> None:
    for result in outcomes[mode].result():
        assert result["code"] == "no_checkpoint"
        assert "is being deleted" in result["message"]
