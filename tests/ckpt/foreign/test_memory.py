"""Exports and imports take the same memory however large the checkpoint is."""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from ckptstore.reading.safetensors import plan_file
from tests.support.command_line import clean_environment, invoke
from tests.support.forking import TRAINER, fork

LARGE = 256 << 20
LIMIT = 200 << 20


def write_zeros(path: Path, size: int) -> None:
    """Three tensors of zeros in a safetensors file that takes no room on the disk."""
    rows = size // 4 // 1024
    shapes = {"a": (rows // 2, 1024), "b": (rows // 4, 1024), "c": (rows // 4, 1024)}
    header, _, length = plan_file([(name, "float32", shape) for name, shape in shapes.items()], {})
    path.write_bytes(header)
    with open(path, "rb+") as file:
        file.truncate(length)


@pytest.mark.parametrize(("kind", "to"), [("huggingface", "folder"), ("torch", "x.pt"), ("dcp", "folder")])
def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path, kind: str, to: str) -> None:
    """Both ways on a small checkpoint, so that everything is loaded, then on the large one."""
    (tmp_path / "store").mkdir()
    write_zeros(tmp_path / "small.safetensors", 1 << 20)
    write_zeros(tmp_path / "large.safetensors", LARGE)
    (in_child, go_on), (said, says) = os.pipe(), os.pipe()
    process = fork(
        TRAINER, __name__, [str(tmp_path), kind, to],
        stdout=says, stderr=2, environment=clean_environment(), strict=True, passed=[in_child],
    )  # fmt: skip
    for descriptor in (in_child, says):
        os.close(descriptor)
    with open(said) as lines, open(go_on, "w") as gate:
        assert lines.readline() == "ready\n"
        before = PeakMemory(process.pid)
        before.look()
        with PeakMemory(process.pid) as peak:
            gate.close()
            assert process.wait(60) == 0
    assert before.bytes < peak.bytes < before.bytes + LIMIT
    shutil.rmtree(tmp_path)


_EVERY_S = 0.005


class PeakMemory:
    """The most anonymous memory that a process had while this context was entered; looks 200 times a second."""

    def __init__(self, pid: int) -> None:
        self.bytes = 0
        self._status = Path(f"/proc/{pid}/status")
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


def main(gate: int, folder: str, kind: str, to: str) -> None:
    """Import and export the small checkpoint; when the gate is closed, the large one."""
    os.chdir(folder)
    for name in ("small", "large"):
        more = ("--format", kind, "--store", "store", "--max-shard-size", "100MB")
        done = [
            invoke("import", f"{name}.safetensors", f"{name}@1", "--store", "store"),
            invoke("export", f"{name}@1", "--to", f"{name}-{to}", *more),
            invoke("import", f"{name}-{to}", f"{name}-{kind}@1", "--store", "store"),
        ]
        assert [one.code for one in done] == [0, 0, 0], done
        if name == "small":
            print("ready", flush=True)
            os.read(gate, 1)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
