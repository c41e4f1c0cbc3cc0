from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ckptapi.hosts import FOLDER
from tests.support.waiting import DEADLINE_S, wait_until


def agent(folder: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "ckptd", "agent", "--store", str(folder), "--port", "0", *options]
    return subprocess.Popen([*command, "--notice-seconds", "0"])


def test_one_agent_serves_a_folder_until_no_process_needs_it(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    trainer = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    (tmp_path / FOLDER / f"trainer-{trainer.pid}").touch()
    first = agent(tmp_path, "--idle-seconds", "0.1")
    wait_until(lambda: (tmp_path / FOLDER / "agent.json").exists(), "the agent's note")
    assert agent(tmp_path).wait(DEADLINE_S) == 0, "the folder has one"
    assert first.poll() is None
    trainer.communicate(b"\n")
    assert first.wait(DEADLINE_S) == 0
    assert not (tmp_path / FOLDER / "agent.json").exists()
