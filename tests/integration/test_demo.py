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
        [sys.executable, str(ROOT / "examples" / "demo.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "TMPDIR": str(host)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The loss curve is the uninterrupted one, exactly: all 12 steps" in done.stdout
    assert not list(host.rglob("*.known")), "the next demonstration would find that its runs have vanished"
    assert done.stdout.count("SIGKILL at step") == 3  # two, and the heading that announces the second


def test_equal_curves_pass() -> None:
    compare(REFERENCE, PARTS, [1, 2])


def test_a_difference_in_the_last_bit_is_found() -> None:
    losses = {2: 2.5, 3: math.nextafter(2.25, 3)}
    with pytest.raises(DemoFailed, match=r"differ at steps \[3\]"):
        compare(REFERENCE, [PARTS[0], replace(PARTS[1], losses=losses)], [1, 2])


def test_a_gap_is_found() -> None:
    with pytest.raises(DemoFailed, match=r"missing steps \[2\]"):
        compare(REFERENCE, [Curve("first", {1: 3.0}, None), Curve("second", {3: 2.25}, "abc")], [1, 3])


def test_a_start_from_scratch_is_found() -> None:
    with pytest.raises(DemoFailed, match="began at step 1, not at 2"):
        compare(REFERENCE, [PARTS[0], replace(REFERENCE, name="second")], [1, 2])


def test_other_weights_are_found() -> None:
    with pytest.raises(DemoFailed, match="final weights"):
        compare(REFERENCE, [PARTS[0], replace(PARTS[1], weights="abd")], [1, 2])
