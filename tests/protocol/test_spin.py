"""A second model of commit and delete, in Promela. Skipped without `spin` (Debian package) and a C compiler."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

MODEL = Path(__file__).with_name("protocol.pml")
MUTANTS = range(1, 7)

pytestmark = pytest.mark.skipif(
    not (shutil.which("spin") and shutil.which("gcc")), reason="spin or gcc is not installed"
)


def explore(folder: Path, mutant: int = 0) -> tuple[int, int]:
    """Errors and states of an exhaustive search."""
    generate = ["spin", "-a", f"-DMUTANT={mutant}", str(MODEL)]
    build = ["gcc", "-O1", "-w", "-DSAFETY", "-o", "pan", "pan.c"]
    search = ["./pan", "-m100000", "-w22", "-E"]  # -E: a process that stops is no error
    for command in (generate, build):
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=300)
    report = subprocess.run(search, cwd=folder, check=True, capture_output=True, text=True, timeout=300).stdout
    errors = re.search(r"errors: (\d+)", report)
    states = re.search(r"(\S+) states, stored", report)
    assert errors
    assert states
    assert "max search depth too small" not in report
    return int(errors[1]), int(float(states[1]))


def test_no_order_of_steps_violates_an_invariant(tmp_path: Path) -> None:
    errors, states = explore(tmp_path)
    print(f"\nspin: {states} states")
    assert errors == 0
    assert states > 1000


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_rule_that_is_left_out_is_missed(tmp_path: Path, mutant: int) -> None:
    assert explore(tmp_path, mutant)[0] == 1
