"""Processes killed with SIGKILL: what save_async returned for is committed, nothing torn is ever listed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from ckpt import Checkpointer
from ckpt.restoring.tensors import load_tensors
from ckptstore.catalog import Checkpoint
from ckptstore.clock import system_clock
from ckptstore.deletion import apply_prune, collect, plan_prune
from ckptstore.errors import SaverDied
from ckptstore.names import attempts_prefix
from ckptstore.retention import Policy
from ckptstore.source import StoreSource
from ckptstore.stores import open_store
from ckptstore.verify import verify
from tests.support.ddp import ROOT
from tests.support.kill_train import weights

ROUNDS = 50


class Trainer:
    """A running kill_train and what it said so far."""

    def __init__(self, store: Path, daemon: str | None = None) -> None:
        command = [sys.executable, "-m", "tests.support.kill_train", str(store)]
        self.process = subprocess.Popen(
            [*command, *([daemon] if daemon else [])], cwd=ROOT, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.resumed: int | None = None
        self.saved = 0
        self.saver = 0
        self.deaths = 0
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            word, number = line.split()
            if word == "resumed":
                self.resumed = int(number)
            elif word == "saver":
                self.saver = int(number)
            elif word == "saved":
                self.saved = int(number)
            elif word == "died":
                self.deaths += 1

    def kill(self) -> None:
        """SIGKILL, and hear what it said last."""
        self.process.kill()
        self.process.wait()
        self._listener.join()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def wait_for_save(self) -> None:
        """Wait until another save_async returned."""
        seen = self.saved
        until(lambda: self.saved > seen)

    def wait_for_death(self, seen: int) -> None:
        """Wait until it reports more than `seen` deaths of savers."""
        until(lambda: self.deaths > seen)


@contextlib.contextmanager
def trainer_on(store: Path, daemon: str | None = None) -> Iterator[Trainer]:
    trainer = Trainer(store, daemon)
    try:
        yield trainer
    finally:
        trainer.kill()


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    """Wait for a condition, or fail."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def check(source: StoreSource, checkpoint: Checkpoint) -> None:
    """It is whole, and holds the weights of its step."""
    assert verify(source, checkpoint).ok
    assert torch.equal(load_tensors(source, checkpoint, "model/w")["model/w"], weights(checkpoint.step))


def test_trainer_killed_right_after_save_async_returned(tmp_path: Path) -> None:
    source = StoreSource(open_store(str(tmp_path)))
    with trainer_on(tmp_path) as trainer:
        until(lambda: trainer.saved >= 1)
        trainer.kill()
    # The saver outlives the trainer, commits all it was given, and ends by itself.
    until(lambda: not is_alive(trainer.saver), seconds=10)
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
        until(lambda: checkpointer.saver_pid is None)
        with pytest.raises(SaverDied, match=f"saver process {first} was killed by signal 9"):
            checkpointer.save_async(model, None, 3)
        assert isinstance(lost.exception(), SaverDied)
        assert checkpointer.saver_pid not in (None, first)
        assert checkpointer.save(model, None, 4).step == 4
        assert [c.step for c in StoreSource(open_store(str(tmp_path))).checkpoints("r")] == [4, 1]


def test_restore_waits_for_the_saver_of_a_killed_trainer(tmp_path: Path) -> None:
    with trainer_on(tmp_path) as trainer:
        until(lambda: trainer.saved >= 2)
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


@pytest.mark.slow
def test_random_kills_never_tear_a_checkpoint(tmp_path: Path) -> None:
    """Trainer, saver, both: whatever is killed whenever, what is listed is whole, and orphans go in the end."""
    store = open_store(str(tmp_path))
    source = StoreSource(store)
    dice = random.Random(20)
    reached, killed = 0, dict.fromkeys(("trainer", "saver", "both"), 0)
    trainer = Trainer(tmp_path)
    try:
        for _ in range(ROUNDS):
            if trainer.process.poll() is not None:
                trainer = Trainer(tmp_path)
            trainer.wait_for_save()
            time.sleep(dice.random() * 0.15)
            victim = dice.choice(["trainer", "saver", "saver", "both"])
            killed[victim] += 1
            deaths = trainer.deaths
            if victim != "trainer":
                os.kill(trainer.saver, signal.SIGKILL)
            if victim != "saver":
                trainer.kill()
            else:
                trainer.wait_for_death(deaths)
            for checkpoint in source.checkpoints("kill")[:3]:
                check(source, checkpoint)
            latest = source.latest("kill")
            assert latest.step >= reached
            assert trainer.process.poll() in (None, -signal.SIGKILL)
            reached = latest.step
            apply_prune(store, plan_prune(store, "kill", Policy(4), system_clock), system_clock)
    finally:
        trainer.kill()
    until(lambda: not is_alive(trainer.saver))
    assert all(count >= ROUNDS // 8 for count in killed.values())
    collect(store, "kill", lambda: system_clock() + 1, grace_s=0.5)
    left = {str(checkpoint.attempt) for checkpoint in source.checkpoints("kill")}
    assert set(store.list_folders(attempts_prefix("kill"))) == left, [i.key for i in store.list("kill")]
