"""Exports and imports take the same memory however large the checkpoint is."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from ckpt.foreign.safetensors_file import plan_file
from tests.support.command_line import clean_environment
from tests.support.waiting import Lines

LARGE = 320 << 20
LIMIT = 200 << 20

# Runs each command on a small checkpoint, so that everything is loaded, then on the large one.
COMMANDS = """
import sys
from tests.support.command_line import invoke

def both_ways(run, kind, to):
    done = [
        invoke("export", f"{run}@1", "--to", to, "--format", kind, "--store", "store", "--max-shard-size", "100MB"),
        invoke("import", to, f"{run}-{kind}@1", "--store", "store"),
    ]
    assert [d.code for d in done] == [0, 0], done

kind, to = sys.argv[1:]
invoke("import", "small.safetensors", "small@1", "--store", "store")
invoke("import", "large.safetensors", "large@1", "--store", "store")
both_ways("small", kind, f"small-{to}")
print("ready", flush=True)
sys.stdin.readline()
both_ways("large", kind, f"large-{to}")
"""


def write_zeros(path: Path, size: int) -> None:
    """Three tensors of zeros in a safetensors file that takes no room on the disk."""
    rows = size // 4 // 1024
    shapes = {"a": (rows // 2, 1024), "b": (rows // 4, 1024), "c": (rows // 4, 1024)}
    layout = plan_file([(name, "float32", shape) for name, shape in shapes.items()], {})
    path.write_bytes(layout.header)
    with open(path, "rb+") as file:
        file.truncate(layout.bytes)


@pytest.mark.parametrize(("kind", "to"), [("huggingface", "folder"), ("torch", "x.pt"), ("dcp", "folder")])
def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path, kind: str, to: str) -> None:
    (tmp_path / "store").mkdir()
    write_zeros(tmp_path / "small.safetensors", 1 << 20)
    write_zeros(tmp_path / "large.safetensors", LARGE)
    root = Path(__file__).parents[3]
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", COMMANDS, kind, to],
        env=clean_environment({"PYTHONPATH": str(root)}),
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert Lines(process.stdout).next() == "ready\n"
        before = PeakMemory(process)
        before.look()
        with PeakMemory(process) as peak:
            process.stdin.close()
            process.wait(60)
    assert process.returncode == 0
    print((peak.bytes - before.bytes) / 2**20)
    assert before.bytes < peak.bytes < before.bytes + LIMIT
    shutil.rmtree(tmp_path)


_EVERY_S = 0.005


class PeakMemory:
    """The most anonymous memory that a process had while this context was entered; looks 200 times a second."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.bytes = 0
        self._status = Path(f"/proc/{process.pid}/status")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def look(self) -> None:
        """Look once more."""
        found = re.search(r"RssAnon:\s+(\d+) kB", self._status.read_text())
        self.bytes = max(self.bytes, int(found[1]) << 10 if found else 0)

    def _watch(self) -> None:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has been waited for
            while not self._stop.wait(_EVERY_S):
                self.look()
