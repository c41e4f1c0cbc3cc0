"""What other programs see of savers."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from ckpt import Checkpointer
from ckpt.saver.presence import NewNote, savers
from tests.ckpt.saver.attempts import new_setup
from tests.support.waiting import present, wait_until


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))


def test_a_save_that_the_saver_has_not_read_is_not_missed(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path / "store"), run="r", writer="process") as checkpointer:
        checkpointer.save_async(None, None, 1, shared={"w": np.zeros(8)}).result(60)
        pid = present(checkpointer.saver_pid)
        wait_until(lambda: [(state.pid, state.uploading) for state in savers()] == [(pid, 0)])
        os.kill(pid, signal.SIGSTOP)
        try:
            handle = checkpointer.save_async(None, None, 2, shared={"w": np.ones(8)})
            assert handle.wait_staged(60)
            assert [(state.pid, state.uploading) for state in savers()] == [(pid, 1)]
        finally:
            os.kill(pid, signal.SIGCONT)
        handle.result(60)
        wait_until(lambda: [state.uploading for state in savers()] == [0])
    assert not savers()


def test_a_note_that_is_being_written_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note = NewNote(new_setup(str(tmp_path)))
    note._counts[0] = 7
    note._write_counts()
    (whole,) = savers()
    read, halves = Path.read_bytes, [b"", b"{}", read_half(note.path)]
    monkeypatch.setattr(Path, "read_bytes", lambda path: halves.pop() if halves else read(path))
    assert savers() == [whole]
    assert not halves
    note.close()
    assert not savers()
    assert not note.path.exists(), "its saver is gone"


def test_a_saver_whose_note_cannot_be_read_counts_as_busy(tmp_path: Path) -> None:
    note = NewNote(new_setup(str(tmp_path)))
    note.path.write_bytes(b'{"uploading":0}')  # of another version, or damaged
    assert [(state.store, state.uploading) for state in savers()] == [(str(note.path), 1)]
    note.close()
    assert not savers()


def read_half(path: Path) -> bytes:
    content = path.read_bytes()
    return content.replace(b'"rank":0', b'"rank":1', 1)
