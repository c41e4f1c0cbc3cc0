"""Exceptions of signal handlers at any line of a save, a restore, a step or a close lose and mix nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

_EVERY = 1 if os.environ.get("CKPTD_INTERRUPTS") == "all" else 160


def test_an_exception_at_any_line_leaves_what_is_committed_as_it_was_at_the_call() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.ckpt.interrupted", "0", str(_EVERY)],
        cwd=Path(__file__).parents[2], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["raised"] > 30
    assert found["findings"] == []
