"""The demonstration works, and would say so if it did not."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from examples.demo import Curve, DemoFailed, compare

ROOT = Path(__file__).parents[2]
REFERENCE = Curve("reference", {1: 3.0, 2: 2.5, 3: 2.25}, "abc")
PARTS = [Curve("first", {1: 3.0, 2: 2.5}, None), Curve("second", {2: 2.5, 3: 2.25}, "abc")]


@pytest.mark.slow
def test_a_short_demonstration_succeeds(tmp_path: Path) -> None:
    host = tmp_path / "host"
    host.mkdir()
    arguments = ["--steps", "12", "--save-every", "2", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py"), *arguments], capture_output=True, text=True, timeout=500,
        env={**os.environ, "TMPDIR": str(host)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The loss curve is the uninterrupted one, exactly: all 12 steps" in done.stdout
    assert not list(host.rglob("*.known")), "the next demonstration would find that its runs have vanished"
    assert done.stdout.count("SIGKILL at step") == 3  # two, and the heading that announces the second


def test_equal_curves_pass() -> None:
    compare(REFERENCE, PARTS, [1, 2])


@pytest.mark.parametrize(
    ("first", "second", "began", "says"),
    [
        (PARTS[0], replace(PARTS[1], losses={2: 2.5, 3: math.nextafter(2.25, 3)}), 2, r"differ at steps \[3\]"),
        (Curve("first", {1: 3.0}, None), Curve("second", {3: 2.25}, "abc"), 3, r"missing steps \[2\]"),
        (PARTS[0], replace(REFERENCE, name="second"), 2, "began at step 1, not at 2"),
        (PARTS[0], replace(PARTS[1], weights="abd"), 2, "final weights"),
    ],
    ids=["another last bit", "a gap", "a start from scratch", "other weights"],
)
def test_a_difference_is_found(first: Curve, second: Curve, began: int, says: str) -> None:
    with pytest.raises(DemoFailed, match=says):
        compare(REFERENCE, [first, second], [1, began])
