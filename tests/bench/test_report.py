"""A verdict says what was measured, and which goals are missed."""

from __future__ import annotations

import json
import math

import pytest

from bench.report import Goal, Report


@pytest.mark.parametrize(
    ("ratio", "direction", "ok"),
    [
        (0.9, "at most", True),
        (1.0, "at most", True),
        (1.1, "at most", False),
        (0.9, "at least", False),
        (1.0, "at least", True),
        (1.1, "at least", True),
        (math.nan, "at most", False),
        (math.nan, "at least", False),
    ],
)
def test_a_goal_knows_its_direction_and_what_was_not_measured_is_missed(ratio: float, direction: str, ok: bool) -> None:
    assert Goal("save", "memcpy", ratio, 1.0, direction).ok is ok  # type: ignore[arg-type]


def test_a_verdict_is_valid_json_and_false_if_one_goal_is_missed() -> None:
    goals = [Goal("eager", "memcpy", 1.04999, 1.1, "at most"), Goal("first", "later", math.inf, 1.5, "at most")]
    report = Report(
        "stall", "1 GB", ("", "s"), [("memcpy", "0.1")], goals, limit=0.1, peers={"dcp": 0.3},
        problems={"x": "ImportError"}, state_bytes=10**9, facts={"s": 0.123456, "steps": 7},
    )  # fmt: skip
    verdict = json.loads(json.dumps(report.verdict(), allow_nan=False))
    assert verdict["ok"] is False
    assert {
        "bench": "stall",
        "ratio": 1.05,
        "vs": "memcpy",
        "goal": 1.1,
        "direction": "at most",
    }.items() <= verdict.items()
    assert verdict["goals"][1] == {
        "name": "first", "vs": "later", "ratio": None, "goal": 1.5, "direction": "at most", "ok": False,
    }  # fmt: skip
    assert verdict["limit"] == 0.1
    assert verdict["peers"] == {"dcp": 0.3}
    assert verdict["problems"] == {"x": "ImportError"}
    assert verdict["state_bytes"] == 10**9
    assert verdict["facts"] == {"s": 0.1235, "steps": 7}
