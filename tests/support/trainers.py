"""Trainers to be killed, and waiting for what becomes of it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from tests.support.forking import TRAINER, fork
from tests.support.waiting import wait_until


class Trainer:
    """A running kill_train and what it said so far."""

    def __init__(
        self, store: Path | str, second: str | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        said, says = os.pipe()
        arguments = [str(store), *([second] if second else [])]
        self.process = fork(
            TRAINER, "tests.support.kill_train", arguments, stdout=says, stderr=2, environment=environment
        )
        os.close(says)
        self._said = open(said)  # noqa: SIM115 - closed when it has ended
        self.resumed: int | None = None
        self.saved = 0
        self.saver = 0
        self.deaths = 0
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        for line in self._said:
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
        self.process.kill()
        self.process.wait()
        self._listener.join()
        self._said.close()

    def wait_for_save(self) -> None:
        seen = self.saved
        wait_until(lambda: self.saved > seen)


@contextlib.contextmanager
def trainer_on(store: Path, daemon: str | None = None) -> Iterator[Trainer]:
    trainer = Trainer(store, daemon)
    try:
        yield trainer
    finally:
        trainer.kill()


@contextlib.contextmanager
def suspended(pid: int) -> Iterator[Callable[[], None]]:
    """A process is stopped until the function is called or the block ends: a test that fails must not wait for it."""
    resume = partial(os.kill, pid, signal.SIGCONT)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield resume
    finally:
        resume()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
