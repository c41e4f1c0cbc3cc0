"""The simulation of a daemon: what it counts is what the index, the listings and the retention need."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import scale_daemon

EACH_LOOK = 5
"""Listings of a run: outcomes, tombstones, the dead, quarantine, labels. Generations are the sixth."""


@pytest.mark.parametrize(("size", "per_run"), [(60, 30), (30, 30)])
def test_requests_grow_with_what_is_new(tmp_path: Path, size: int, per_run: int) -> None:
    runs = size // per_run
    found = scale_daemon.simulate(tmp_path, size, per_run)
    looks = (EACH_LOOK + 1) * runs
    # A first scan looks twice: at what has changed, then at what to read. Each outcome is read once.
    assert found["first scan requests"] == 1 + 2 * looks + size
    assert found["refresh requests"] <= 1 + 2 * looks
    assert found["refresh after a commit requests"] == 1 + looks + (EACH_LOOK + 1) + 1
    assert found["latest requests"] == found["page of the listing requests"] == 0
    assert found["retention plan of a run requests"] >= per_run + 2, "the store decides, not the index"
    assert found["index bytes"] > 0


def test_a_power_of_growth() -> None:
    found = {10: {"cost": 3.0, "none": 0.0}, 1000: {"cost": 300.0, "none": 0.0}, 100_000: {"cost": 3e6, "none": 0.0}}
    assert scale_daemon.exponent(found, "cost") == pytest.approx(2.0)
    assert scale_daemon.exponent(found, "none") == 0.0
