"""The benchmark of leaves: saves on the thread that stands in for a GPU are committed and timed."""

from __future__ import annotations

import pytest

from bench import leaves


def test_every_save_of_a_round_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaves, "LEAVES", (8, 40))
    report = leaves.measure(quick=True)
    assert [row[:2] for row in report.rows] == [
        (number, save) for number in ("8", "40") for save in ("first", "second", "third", "later")
    ]
    assert all(goal.ratio > 0 for goal in report.goals)
