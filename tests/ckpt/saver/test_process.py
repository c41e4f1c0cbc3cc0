"""The saver process: what it takes of the machine; and with a trainer that dies while a receipt is missing."""

from __future__ import annotations

import os
import socket
import tempfile
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from ckpt import Checkpointer
from ckpt.host.lock import SaverLock, wait_for_orphans
from ckpt.host.segment import Segment
from ckpt.saver.messages import IGNORED, Channel, Slot, Stop
from ckpt.saver.presence import NewNote
from ckpt.snapshot.writers import _start
from ckptstore.commits.commit import receipt_ranks, roll_forward
from ckptstore.reading.source import StoreSource
from ckptstore.run import Run
from ckptstore.stores import open_store
from tests.ckpt.saver.attempts import new_attempt, new_job, new_setup, stored
from tests.support.checkpoints import write_rank
from tests.support.waiting import open_files, wait_until

COUNT = 4_000_000


@pytest.mark.parametrize("last", [b"", b"\5\0\0\0\0\0\0\0hello", b"\xff" * 8], ids=["end", "no command", "no length"])
def test_a_saver_without_trainer_finishes_and_holds_no_memory_nor_next_trainer(last: bytes, tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    run, attempt = Run(store, "r"), new_attempt(3)
    setup = new_setup(str(tmp_path), world_size=2)
    job = new_job(attempt, COUNT)
    segment = Segment(COUNT * 4)
    segment.view[:] = np.ones(COUNT, dtype=np.float32).tobytes()
    ours, theirs = socket.socketpair()
    presence = SaverLock(setup.store, setup.run)
    with tempfile.TemporaryFile() as stderr:
        saver = _start(theirs.fileno(), presence.saver, NewNote(setup), stderr.fileno())
        try:
            theirs.close()
            presence.inherited()
            channel = Channel(ours)
            channel.send(setup)
            channel.send(Slot(0, COUNT * 4), fds=[segment.fd])
            channel.send(job)
            ours.sendall(last)
            channel.close()
            presence.close()
            segment.close()

            assert wait_for_orphans(setup.store, setup.run, timeout_s=30)
            assert receipt_ranks(run, stored(attempt)) == {0}
            assert saver.poll() is None
            held = "".join(open_files(saver.pid).values())
            assert "ckpt-arena" not in held + Path(f"/proc/{saver.pid}/maps").read_text()

            # The other rank's receipt comes after all, and another process commits; the orphan sees it and ends.
            write_rank(store, "r", stored(attempt), {}, rank=1, world_size=2)
            assert roll_forward(run, stored(attempt)) is not None
            assert saver.wait(30) == bool(last)
        finally:
            saver.kill()
            saver.wait()
    assert StoreSource(store).latest("r").world_size == 2


def test_signals_to_the_whole_job_do_not_end_a_saver_that_begins(tmp_path: Path) -> None:
    setup = new_setup(str(tmp_path))
    ours, theirs = socket.socketpair()
    presence = SaverLock(setup.store, setup.run)
    with closing(Channel(ours)) as channel, theirs, tempfile.TemporaryFile() as stderr:
        saver = _start(theirs.fileno(), presence.saver, NewNote(setup), stderr.fileno())
        for number in IGNORED:
            saver.send_signal(number)  # it has not loaded itself yet
        presence.inherited()
        presence.close()
        channel.send(setup)
        channel.send(Stop())
        assert saver.wait(60) == 0


def test_a_saver_keeps_to_its_cpu_budget_and_gives_way(tmp_path: Path) -> None:
    model = nn.ParameterDict({"w": torch.randn(12 << 20)})  # 48 MiB
    budget, burst_s, chunk_s = 0.02, 1.0, 0.01
    with Checkpointer(str(tmp_path), run="r", compress="fast", slots=1, cpu_budget=budget) as checkpointer:
        handle = checkpointer.save_async(model, None, 1)
        assert handle.result(60).step == 1
        assert checkpointer.saver_pid is not None
        assert os.sched_getscheduler(checkpointer.saver_pid) == os.SCHED_BATCH
        assert os.getpriority(os.PRIO_PROCESS, checkpointer.saver_pid) > os.getpriority(os.PRIO_PROCESS, 0)
    timings = handle.timings
    assert 0 < timings.cpu_s <= budget * (timings.encode_s + timings.upload_s + burst_s) + chunk_s


def test_the_trainer_says_which_store_does_not_answer_and_for_how_long(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "store"
    with Checkpointer(str(folder), run="r", writer="process", retry_s=60) as run:
        run.save(nn.Linear(2, 2), None, 1)
        folder.rename(tmp_path / "away")
        saved = run.save_async(nn.Linear(2, 2), None, 2)
        said = f"file://{folder} does not answer, requests are repeated for 60 s more: there is no folder {folder}"
        wait_until(lambda: said in caplog.text, "the outage")
        (tmp_path / "away").rename(folder)
        assert saved.result(60).step == 2
        wait_until(lambda: f"file://{folder} answers again" in caplog.text, "its end")
