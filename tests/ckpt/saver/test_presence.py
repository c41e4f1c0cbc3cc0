"""Savers that other programs find by their processes, before they have a note."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ckpt.saver.presence import read_loaded, savers
from tests.support.waiting import wait_until


@pytest.mark.parametrize("name", ["cmdline", "environ"])
def test_a_saver_that_is_being_loaded_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its command line and environment are empty for a moment, and a launcher that saw no saver would leave."""
    command = [sys.executable, "-S", "-c", "input()  # from ckpt.saver.process import run"]
    read, empty = Path.read_bytes, [b"", b""]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as saver:
        path = Path(f"/proc/{saver.pid}/{name}")
        wait_until(lambda: read(path))
        monkeypatch.setattr(Path, "read_bytes", lambda one: empty.pop() if one == path and empty else read(one))
        assert saver.pid in [state.pid for state in savers()]
        saver.kill()
    assert not empty


def test_processes_without_a_program_are_not_waited_for() -> None:
    with subprocess.Popen(["true"]) as ended:
        wait_until(lambda: Path(f"/proc/{ended.pid}/stat").read_text().split()[2] == "Z")
        with pytest.raises(OSError, match="exe"):
            read_loaded(Path(f"/proc/{ended.pid}/cmdline"))
