"""What is promised on macOS: ckptctl, ckpt.load, restores, and a writer in threads of the trainer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_nothing_that_only_linux_has_is_needed(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.other_system", str(tmp_path)], cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    times, *words = done.stdout.split()
    assert words == ["times", "durable"]
    assert int(times) > 20, "fsync does not reach the medium on macOS"
