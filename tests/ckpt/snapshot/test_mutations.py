"""Random lives of saves whose state is changed: see mutating.py. Run in other processes: a crash is a finding.

CKPTD_LIFE_CYCLES says how many are tried; a few by default.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.parallel.runner import Outcome, Scenario, run_scenarios

_NUMBER = int(os.environ.get("CKPTD_LIFE_CYCLES", 50))
_OF_TWO_RANKS = 3 * _NUMBER // 10


def _lives(store: Path, numbers: range, world_size: int) -> Scenario:
    arguments: dict[str, Any] = {"store": str(store), "numbers": list(numbers)}
    function = "tests.ckpt.snapshot.mutating:live"
    return Scenario(function, world_size, arguments, timeout_s=120 + 10 * len(numbers))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    folder = tmp_path_factory.mktemp("mutations")
    one = _lives(folder / "one", range(_NUMBER - _OF_TWO_RANKS), 1)
    two = _lives(folder / "two", range(_NUMBER - _OF_TWO_RANKS, _NUMBER), 2)
    (folder / "ranks").mkdir()
    return run_scenarios([one, two], folder / "ranks")


@pytest.mark.timeout(240 + 10 * _NUMBER)
@pytest.mark.parametrize("scenario", [0, 1], ids=["one rank", "two ranks"])
def test_what_is_committed_is_the_state_of_the_call(outcomes: list[Outcome], scenario: int) -> None:
    for result in outcomes[scenario].result():
        ended: Counter[str] = Counter(result)
        print(dict(ended))
        assert ended["committed"] >= 5
        assert ended["snapshot_torn"] + ended["rank_failed"] >= 1
        assert ended.total() == ended["committed"] + ended["snapshot_torn"] + ended["rank_failed"]
