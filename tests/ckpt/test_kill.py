"""Processes killed with SIGKILL: what save_async returned for is committed, nothing torn is ever listed."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from ckpt import Checkpointer
from ckpt.restoring.pipeline import load_tensors
from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import SaverDied
from ckptstore.reading.source import StoreSource
from ckptstore.reading.verify import verify
from ckptstore.stores import open_store
from tests.support.kill_train import weights
from tests.support.trainers import is_alive, trainer_on
from tests.support.waiting import wait_until


def check(source: StoreSource, checkpoint: Checkpoint) -> None:
    """It is whole, and holds the weights of its step."""
    assert verify(source, checkpoint).ok
    assert torch.equal(load_tensors(source, checkpoint, "model/w")["model/w"], weights(checkpoint.step))


def test_trainer_killed_right_after_save_async_returned(tmp_path: Path) -> None:
    source = StoreSource(open_store(str(tmp_path)))
    with trainer_on(tmp_path) as trainer:
        wait_until(lambda: trainer.saved >= 1)
        trainer.kill()
    # The saver outlives the trainer, commits all it was given, and ends by itself.
    wait_until(lambda: not is_alive(trainer.saver))
    latest = source.latest("kill")
    assert latest.step >= trainer.saved
    check(source, latest)


def test_death_of_the_saver_is_reported_and_healed(tmp_path: Path) -> None:
    model = nn.Linear(300, 300)
    with Checkpointer(str(tmp_path), run="r") as checkpointer:
        checkpointer.save(model, None, 1)
        first = checkpointer.saver_pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        lost = checkpointer.save_async(model, None, 2)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: checkpointer.saver_pid is None)
        with pytest.raises(SaverDied, match=f"saver process {first} was killed by signal 9"):
            checkpointer.save_async(model, None, 3)
        assert isinstance(lost.exception(), SaverDied)
        assert checkpointer.saver_pid not in (None, first)
        assert checkpointer.save(model, None, 4).step == 4
        assert [c.step for c in StoreSource(open_store(str(tmp_path))).checkpoints("r")] == [4, 1]


def test_death_of_an_idle_saver_is_reported_at_the_end_and_nothing_is_left_running(tmp_path: Path) -> None:
    checkpointer = Checkpointer(str(tmp_path), run="r")
    checkpointer.save(nn.Linear(4, 4), None, 1)
    assert checkpointer.saver_pid is not None
    os.kill(checkpointer.saver_pid, signal.SIGKILL)
    wait_until(lambda: checkpointer.saver_pid is None)
    with pytest.raises(SaverDied):
        checkpointer.close()
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    commands = [Path(f"/proc/{child}/cmdline").read_bytes() for child in children]
    assert not [command for command in commands if b"ckpt.saver.process" in command]
    checkpointer.close()


def test_restore_waits_for_the_saver_of_a_killed_trainer(tmp_path: Path) -> None:
    with trainer_on(tmp_path) as trainer:
        wait_until(lambda: trainer.saved >= 2)
        os.kill(trainer.saver, signal.SIGSTOP)
        trainer.kill()
        resume = threading.Timer(0.5, os.kill, (trainer.saver, signal.SIGCONT))
        resume.start()
        model = nn.ParameterDict({"w": torch.zeros_like(weights(0))})
        with Checkpointer(str(tmp_path), run="kill") as checkpointer:
            restored = checkpointer.restore(model)
        resume.join()
    assert restored is not None
    assert restored.step >= trainer.saved
