"""The README is short, and its figures are measured. tests/docs runs what it prints."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "README.md").read_text()


def test_it_has_at_most_90_lines() -> None:
    assert len(PAGE.splitlines()) <= 90


def test_its_figures_are_those_of_the_full_benchmarks() -> None:
    def ratio(bench: str, name: str, vs: str) -> float:
        goals = json.loads((ROOT / f"bench/results/full/{bench}.json").read_text())["goals"]
        (found,) = [goal["ratio"] for goal in goals if (goal["name"], goal["vs"]) == (name, vs)]
        return float(found)

    text = " ".join(PAGE.split())
    assert f"{ratio('durable-disk', 'torch.save', 'ckptd, raw'):.1f} times as fast as `torch.save` with fsync" in text
    assert f"{ratio('durable-disk', 'dcp', 'ckptd, raw'):.1f} times as fast as torch's DCP" in text
    assert "a restore takes a quarter of DCP's time" in text
    assert 1 / ratio("restore-warm", "dcp", "ckptd, raw") < 0.275
