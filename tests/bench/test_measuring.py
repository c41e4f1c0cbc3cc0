from __future__ import annotations

import json
import math
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench import leaves
from bench.measuring import (
    Spread,
    in_turns,
    memcpy_s,
    raw_read_s,
    raw_write_s,
    rotated,
    sync_tree,
    touched,
    tree_bytes,
)
from bench.ours import Ours
from bench.peers import SAVING, open_peers
from bench.peers.peer import Peer
from bench.report import Goal, Report
from bench.state import SMALL, State, trained


def test_contestants_take_turns_and_one_that_fails_is_left_out_with_its_reason() -> None:
    calls: list[str] = []

    def call(name: str, fails_at: int = 10) -> int:
        calls.append(name)
        if calls.count(name) == fails_at:
            raise ValueError("two\nlines")
        return calls.count(name)

    found, problems = in_turns({"a": lambda: call("a"), "b": lambda: call("b", 2), "c": lambda: call("c")}, 3)
    assert (found, problems) == ({"a": [1, 2, 3], "c": [1, 2, 3]}, {"b": "ValueError: two lines"})
    assert calls == ["a", "b", "c", "b", "c", "a", "c", "a"]


def test_each_comes_first_once_and_the_spread_is_median_and_quartiles() -> None:
    assert sorted(rotated(["a", "b", "c"], turn)[0] for turn in range(3)) == ["a", "b", "c"]
    assert Spread.of([5.0, 1.0, 3.0, 2.0, 4.0]) == Spread(3.0, 2.0, 4.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)


@pytest.mark.parametrize("threads", [1, 3])
def test_bare_writes_and_reads_move_all_bytes(threads: int, tmp_path: Path) -> None:
    size = (20 << 20) + 12345
    source, target = touched(size), touched(size)
    target[:] = bytes(len(target))
    assert raw_write_s(tmp_path / "raw", size, source, threads) > 0
    assert (tmp_path / "raw").read_bytes() == source[:size]
    assert raw_read_s(tmp_path / "raw", target, threads) > 0
    assert target[:size] == source[:size]
    sync_tree(tmp_path)
    assert tree_bytes(tmp_path) == size
    target[:] = bytes(len(target))
    assert memcpy_s(size, target, source) > 0
    assert target[:size] == source[:size]


@pytest.mark.parametrize(
    ("ratio", "direction", "ok"),
    [
        (0.9, "at most", True), (1.0, "at most", True), (1.1, "at most", False), (0.9, "at least", False),
        (1.0, "at least", True), (1.1, "at least", True), (math.nan, "at most", False), (math.nan, "at least", False),
    ],
)  # fmt: skip
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
        "bench": "stall", "ratio": 1.05, "vs": "memcpy", "goal": 1.1, "direction": "at most",
    }.items() <= verdict.items()  # fmt: skip
    assert verdict["goals"][1] == {
        "name": "first", "vs": "later", "ratio": None, "goal": 1.5, "direction": "at most", "ok": False,
    }  # fmt: skip
    assert (verdict["limit"], verdict["peers"]) == (0.1, {"dcp": 0.3})
    assert (verdict["problems"], verdict["state_bytes"]) == ({"x": "ImportError"}, 10**9)
    assert verdict["facts"] == {"s": 0.1235, "steps": 7}


def test_every_save_of_a_round_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaves, "LEAVES", (8, 40))
    monkeypatch.setattr(leaves, "QUICK_ROUNDS", 1)
    report = leaves.measure(quick=True)
    assert [row[:2] for row in report.rows] == [
        (number, save) for number in ("8", "40") for save in ("first", "second", "third", "later")
    ]
    assert all(goal.ratio > 0 for goal in report.goals)


INSTALLED = ("torch.save", "torch.load(mmap)", "dcp", "dcp-thread", "safetensors")
"""Where the project is checked; others are used if they are there."""


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> State:
    monkeypatch.setenv(SMALL, "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return trained("fp32", 1_000_000)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_was_saved_comes_back_bit_by_bit(state: State, tmp_path: Path) -> None:
    want = state.digest()
    with ExitStack() as stack:
        peers, problems = open_peers(INSTALLED, stack)
        assert problems == {}
        contestants: dict[str, Peer] = {"ckptd": stack.enter_context(Ours(tmp_path)), **peers}
        for name, peer in contestants.items():
            folder = tmp_path / name
            peer.save(state, folder)
            assert 0.5 < peer.stored_bytes(folder) / state.num_bytes < 1.2
            state.forget()
            peer.load(folder, state)
            assert state.digest() == want, name
            peer.discard(folder)
            assert not folder.exists()


def test_a_peer_that_is_missing_is_listed_and_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SAVING, "gone", "bench.peers.gone:Gone")
    with ExitStack() as stack:
        peers, problems = open_peers(["gone", "safetensors"], stack)
    assert list(peers) == ["safetensors"]
    assert problems == {"gone": "ModuleNotFoundError: No module named 'bench.peers.gone'"}
