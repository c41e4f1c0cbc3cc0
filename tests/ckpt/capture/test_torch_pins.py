"""What we use of torch beyond its public interfaces does what we think. A new torch that changes it fails here."""

from __future__ import annotations

import pytest

from tests.support.parallel.runner import Outcome, Scenario, run_scenarios

_PINS = ("dtensor", "fsdp2", "fsdp1", "zero", "store_and_exchange", "store_and_exchange over tcp")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    scenarios = {
        name: Scenario(f"tests.ckpt.capture.pin_ranks:{name.split()[0]}", 2, tcp=name.endswith("tcp")) for name in _PINS
    }
    scenarios["strided"] = Scenario("tests.ckpt.capture.pin_ranks:strided", 6)
    found = run_scenarios(list(scenarios.values()), tmp_path_factory.mktemp("pins"))
    return dict(zip(scenarios, found, strict=True))


@pytest.mark.parametrize("pin", _PINS)
def test_pinned(outcomes: dict[str, Outcome], pin: str) -> None:
    for result in outcomes[pin].result():
        assert result
        assert [what for what, holds in result.items() if not holds] == []


def test_strided_shards_of_fully_shard_after_tensor_parallel(outcomes: dict[str, Outcome]) -> None:
    """On three times two ranks, where torch's own offsets are wrong for uneven sizes."""
    for result in outcomes["strided"].result():
        assert result["wrong"] == []
        assert len(result["placements"]) == 2
        assert sum("_StridedShard" in placements for placements in result["placements"]) == 1
