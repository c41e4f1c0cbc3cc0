"""python -m bench NAME ends with one line of JSON; the table in the README is made of such lines."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bench.__main__ import BENCHES
from bench.collection import BEGIN, END, README, write_table
from bench.state import SMALL
from tests.support.forking import TRAINER, run

FIELDS = {
    "bench", "ratio", "vs", "goal", "direction", "ok", "limit", "peers", "problems", "state_bytes", "goals", "facts",
}  # fmt: skip


@pytest.mark.parametrize("bench", ["codec", "plan"])
def test_a_benchmark_ends_with_its_verdict(bench: str, tmp_path: Path) -> None:
    environment = os.environ | {SMALL: "1", "XDG_CACHE_HOME": str(tmp_path)}
    command = [bench, "--quick", "--json", str(tmp_path / "verdict")]
    code, printed, errors = run(TRAINER, "bench", command, environment=environment)
    assert code == 0, errors
    line = printed.splitlines()[-1]
    assert (tmp_path / "verdict").read_text() == line + "\n"
    verdict = json.loads(line)
    assert (verdict.keys(), verdict["bench"]) == (FIELDS | {"quick", "machine", "load", "versions"}, bench)
    assert verdict["quick"] is True
    assert verdict["ok"] == all(goal["ok"] for goal in verdict["goals"])
    assert verdict["versions"]["torch"]
    assert verdict["load"].keys() == {"load_before", "free_cores"}


def test_the_table_shows_what_was_missed_what_failed_and_who_did_not_run(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for name in ("full", "again"):
        (tmp_path / name).mkdir()
    (tmp_path / "full" / "plan.json").write_text(json.dumps({"bench": "plan", "error": "killed", "machine": "F"}))
    goals = [
        {"name": "eager", "vs": "memcpy", "ratio": 1.234, "goal": 1.1, "direction": "at most", "ok": False},
        {"name": "overlap", "vs": "memcpy", "ratio": 0.01, "goal": 0.05, "direction": "at most", "ok": True},
        {"name": "overlap", "vs": "best peer", "ratio": 2.0, "goal": 1, "direction": "at most", "ok": False},
        {"name": "first save", "vs": "memcpy", "ratio": 1.0, "goal": 1.1, "direction": "at most", "ok": True},
    ]
    goals += [
        {
            "name": f"{ranks} ranks",
            "vs": "torch.load",
            "ratio": ranks / 4,
            "goal": 1,
            "direction": "at most",
            "ok": ranks < 5,
        }
        for ranks in (3, 1, 5, 2, 4)
    ]
    stall = {"bench": "stall", "goals": goals, "problems": {"dcp": "broken"}, "machine": "M", "state_bytes": 1 << 20}
    stall["load"] = {"load_before": 0.51, "free_cores": 1.9}
    (tmp_path / "again" / "stall.json").write_text(json.dumps(stall | {"versions": {"torch": "2"}}))
    (tmp_path / "again" / "codec.json").write_text(json.dumps({"bench": "codec", "error": "a|b", "machine": "M"}))
    write_table(["stall", "codec", "plan"], tmp_path, readme)
    text = readme.read_text()
    assert "old" not in text
    assert text.startswith(f"before\n{BEGIN}\n")
    assert text.endswith(f"\n{END}\nafter\n")
    for line in (
        "| stall | eager; first save / memcpy | at most 1.1 | not run | **1.23**; 1 |",
        "| stall | overlap / memcpy | at most 0.05 | not run | 0.01 |",
        "| stall | overlap / best peer | at most 1 | not run | **2** |",
        "| stall | 5 cases / torch.load | at most 1 | not run | 0.25 to **1.25** |",
        "| codec | | | not run | did not run: a\\|b |",
        "| plan | | | did not run: killed | not run |",
        "- Again: M; states of 1.0 MiB to 1.0 MiB; 1.9 to 1.9 cores free, load before 0.5 to 0.5.",
        "Versions: torch 2.",
        "- dcp did not run in stall: broken",
    ):
        assert line in text.splitlines()


def test_each_benchmark_is_a_module_and_the_readme_has_a_place_for_their_verdicts() -> None:
    assert [name for name in BENCHES if not (README.parent / f"{name.replace('-', '_')}.py").is_file()] == []
    assert README.read_text().index(BEGIN) < README.read_text().index(END)
    assert len(README.read_text().splitlines()) <= 120
