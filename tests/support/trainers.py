"""Trainers to be killed, and waiting for what becomes of it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.ddp import ROOT


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
            if not line.endswith("\n"):
                return  # killed in the middle of a word
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
