"""All ranks save at the same steps, though they are not at the same step at the same time."""

from __future__ import annotations

from itertools import pairwise

import pytest
from torch._C._distributed_c10d import HashStore

from ckpt.ranks import world as ranks_world
from ckpt.ranks.broadcast import SaveBroadcast
from ckptstore.errors import RankLost
from tests.support.parallel.runner import Outcome, Scenario, run_scenarios

_STORES = ("file", "tcp")
_TIMEOUT_S = 2.0
_UNEVEN = [("tcp", 0, 1), ("tcp", 2, 7), ("file", 1, 1)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[object, Outcome]:
    """All at the same time: most of it is waiting."""
    folder = tmp_path_factory.mktemp("scheduled")
    module = "tests.ckpt.scheduling"
    scenarios: dict[object, Scenario] = {
        "request": Scenario(f"{module}:request_from", 2, {"asking": 1}, tcp=True),
        "save": Scenario(f"{module}:save_by_schedule", 2, {"store": str(folder / "store")}, tcp=True),
    }
    for store, slowest, stride in _UNEVEN:
        arguments = {"slowest": slowest, "stride": stride}
        scenarios["uneven", slowest] = Scenario(f"{module}:train_unevenly", 3, arguments, tcp=store == "tcp")
    for store in _STORES:
        scenarios["straggler", store] = Scenario(f"{module}:save_with_a_straggler", 3, tcp=store == "tcp")
        limit = {"timeout_s": _TIMEOUT_S}
        scenarios["lost", store] = Scenario(f"{module}:lose_rank_zero", 2, limit, lost=(0,), tcp=store == "tcp")
    (folder / "ranks").mkdir()
    found = run_scenarios(list(scenarios.values()), folder / "ranks", together=True)
    return dict(zip(scenarios, found, strict=True))


@pytest.mark.parametrize(("store", "slowest", "stride"), _UNEVEN)
def test_ranks_at_uneven_speed_decide_alike(
    outcomes: dict[object, Outcome], store: str, slowest: int, stride: int
) -> None:
    first, *others = [result["due"] for result in outcomes["uneven", slowest].result()]
    assert others == [first, first]
    assert len(first) >= 2


def test_a_request_of_any_rank_reaches_all(outcomes: dict[object, Outcome]) -> None:
    first, second = [result["due"] for result in outcomes["request"].result()]
    assert first == second
    assert len(first) == 1
    assert first[0] > 50


def test_what_is_due_is_saved_by_all(outcomes: dict[object, Outcome]) -> None:
    first, second = outcomes["save"].result()
    assert first == second
    assert len(first["on the store"]) == len(first["saved"]) >= 1


@pytest.mark.parametrize("store", _STORES)
def test_the_rank_that_a_save_costs_most_counts(outcomes: dict[object, Outcome], store: str) -> None:
    """2 s at 2 % are paid for after 100 s; by rank 0's own figure it would be 10 s."""
    first, *others = [result["due"] for result in outcomes["straggler", store].result()]
    assert others == [first, first]
    assert len(first) >= 4
    assert min(after - before for before, after in pairwise(first)) >= 10


@pytest.mark.parametrize("store", _STORES)
def test_a_rank_without_news_fails_after_the_time_out(outcomes: dict[object, Outcome], store: str) -> None:
    result = outcomes["lost", store].result()[1]
    assert "rank 0" in result["said"]
    assert result["seconds"] > _TIMEOUT_S / 2
    assert 100 <= result["step"] < 10_000


@pytest.mark.parametrize(("members", "named"), [(None, (0, 1)), ((3, 5), (3, 5))])
def test_a_rank_that_waits_for_a_decision_logs_for_whom(
    members: tuple[int, ...] | None,
    named: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(ranks_world, "NOTICE_S", 0.05)
    broadcast = SaveBroadcast(HashStore(), 1, poll_s=0.01, members=members)
    try:
        with pytest.raises(RankLost, match=f"rank {named[0]} did not publish"):
            broadcast.wait_for(lambda _: True, timeout_s=0.2)
    finally:
        broadcast.close()
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        f"rank {named[1]} has waited 0 s for rank {named[0]}, which decides when to save"
    ]
