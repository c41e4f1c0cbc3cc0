"""Checkpointers of process groups: each saves and restores on its ranks, and the others take no part."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command_line import invoke
from tests.support.parallel.runner import Outcome, Scenario, run_scenarios

_RANKS = "tests.ckpt.ranks.grouped:"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("groups") / "store"


@pytest.fixture(scope="module")
def outcomes(store: Path) -> dict[object, Outcome]:
    """All at the same time: most of it is waiting."""
    at = {"store": str(store)}
    scenarios: dict[object, Scenario] = {"at once": Scenario(f"{_RANKS}at_once", 4, at)}
    for split in (False, True):
        arguments = {"store": f"{store}-{split}", "split_replicas": split}
        scenarios["replica", split] = Scenario(f"{_RANKS}one_replica", 4, arguments)
    scenarios["refused"] = Scenario(f"{_RANKS}refused", 2, at)
    scenarios["wait"] = Scenario(f"{_RANKS}wait_in_a_restore", 2, at | {"notice_s": 0.3})
    ranks = store.parent / "ranks"
    ranks.mkdir()
    return dict(zip(scenarios, run_scenarios(list(scenarios.values()), ranks, together=True), strict=True))


def test_two_groups_save_and_restore_a_run_each_at_once(outcomes: dict[object, Outcome], store: Path) -> None:
    found = outcomes["at once"].result()
    assert [result["step"] for result in found] == [3, 5, 3, 5]
    assert all(result["equal"] and result["world_size"] == 2 for result in found)
    assert [result["position"] for result in found] == [0, 1, 2, 3]
    assert [result["asks"] for result in found] == [True, True, False, False], "rank 0 of the job is in one group"
    for rank, result in enumerate(found):
        assert f"ranks {rank % 2} and {rank % 2 + 2} hold different tensors" in result["problems"][0]
    assert [result["problems"][1].partition(":")[0] for result in found[:2]] == ["rank 2", "rank 3"]
    for run in ("run-0@3", "run-1@5"):
        assert invoke("--store", store, "verify", run).code == 0


@pytest.mark.parametrize("split_replicas", [False, True])
def test_a_checkpoint_of_one_replica_group_is_whole(outcomes: dict[object, Outcome], split_replicas: bool) -> None:
    """Its copies are not copy 0 of the mesh; all ranks restore it."""
    for result in outcomes["replica", split_replicas].result():
        assert result["restored"] == result["values"]


def test_a_rank_outside_of_the_group_and_a_group_with_a_part_of_the_state_are_refused(
    outcomes: dict[object, Outcome],
) -> None:
    inside, outside = outcomes["refused"].result()
    assert "'model/0.weight' is sharded over ranks" in inside[0]
    assert "what rank 1 does" in inside[0]
    assert "is none that this process is in" in outside[0]
    assert "make the Checkpointer only on the ranks of that group" in outside[0]
    for result in (inside, outside):
        assert "the process group of this Checkpointer does not exist" in result[1]


def test_a_rank_that_waits_long_in_a_restore_logs_for_which(outcomes: dict[object, Outcome]) -> None:
    waiting, awaited = outcomes["wait"].result()
    assert waiting == ["rank 0 has waited 0 s for rank 1 of 2; all ranks must make the same calls of ckpt"]
    assert awaited == []
