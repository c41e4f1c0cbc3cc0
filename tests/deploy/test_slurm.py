"""The batch script of Slurm, run by bash with the real ckpt-run; srun and scontrol are scripts of this test."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt.saver.launcher import EXIT_BEHIND, EXIT_SAVED
from tests.support.command_line import check_command

SCRIPT = Path(__file__).parents[2] / "examples" / "slurm" / "train.sbatch"
_SRUN = """#!/bin/bash
[ "$1" = --kill-on-bad-exit=0 ] || exit 99
shift
SLURM_PROCID=1 SLURM_LOCALID=1 SLURM_NTASKS=16 exec "$@"
"""
_SCONTROL = """#!/bin/bash
case "$1" in
    show) echo node7; echo node8 ;;
    *) echo "$@" >> "$REQUESTS" ;;
esac
"""
_TRAINER = """
import os, sys
assert [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")] == ["1", "1", "16", "node7"]
assert "CKPT_LAUNCHER" in os.environ
sys.exit(int(os.environ["ENDS_WITH"]))
"""


def run_script(folder: Path, exit_code: int) -> tuple[int, str]:
    """Exit code of the job, and what it asked Slurm for."""
    programs = folder / "bin"
    programs.mkdir()
    for name, text in {"srun": _SRUN, "scontrol": _SCONTROL}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (folder / "train.py").write_text(_TRAINER)
    requests = folder / "requests"
    requests.touch()
    environment = {
        **os.environ, "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}", "SLURM_JOB_ID": "42",
        "SLURM_JOB_NODELIST": "node[7-8]", "REQUESTS": str(requests), "ENDS_WITH": str(exit_code),
    }  # fmt: skip
    done = subprocess.run(["bash", str(SCRIPT)], cwd=folder, env=environment, timeout=120)
    return done.returncode, requests.read_text()


@pytest.mark.parametrize(
    ("exit_code", "requests"),
    [(EXIT_SAVED, "requeue 42\n"), (EXIT_BEHIND, "requeue 42\n"), (0, ""), (1, "")],
    ids=["preempted", "behind", "done", "broken"],
)
def test_only_a_preempted_job_is_requeued(tmp_path: Path, exit_code: int, requests: str) -> None:
    assert run_script(tmp_path, exit_code) == (exit_code, requests)


def test_the_times_fit_each_other_and_the_options_exist() -> None:
    text = SCRIPT.read_text()
    notice = re.search(r"^#SBATCH --signal=USR1@(\d+)$", text, re.MULTILINE)
    command = re.search(r"exec (ckpt-run .*)'$", text, re.MULTILINE)
    assert notice is not None
    assert command is not None
    words = shlex.split(command[1])
    check_command(words)
    assert float(words[words.index("--grace") + 1]) < int(notice[1])
    assert f"grace_s={notice[1]}" in text
    assert "#SBATCH --requeue\n" in text
