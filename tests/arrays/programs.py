"""Programs of Keras, as forks of a process that has imported it: TensorFlow takes five seconds for that."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import ckpt
from tests.support.forking import Fork, fork
from tests.support.waiting import wait_until


class Program:
    """A running program that writes to a file. Kills it at the end of a `with` block."""

    def __init__(self, backend: str, module: str, log: Path, *arguments: object, **variables: str) -> None:
        self._log = log
        # Keras would write its settings to the home folder.
        own = {"KERAS_BACKEND": backend, "KERAS_HOME": "/dev/null/keras", "TF_CPP_MIN_LOG_LEVEL": "3"}
        imports = (*map("=".join, own.items()), "tests.arrays.train_keras")
        with log.open("wb") as out, log.with_suffix(".err").open("wb") as err:
            self._fork: Fork = fork(
                imports, module, list(map(str, arguments)), stdout=out.fileno(), stderr=err.fileno(),
                environment={**os.environ, **own, **variables},
            )  # fmt: skip

    def lines(self, code: int | None = 0) -> list[str]:
        """What it prints, at its end. Raises AssertionError with its errors if it ends in another way; None: any."""
        found = self._fork.wait(300)
        assert code in (found, None), self._log.with_suffix(".err").read_text()
        return self._log.read_text().splitlines()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self._fork.kill()
        self._fork.wait()


def copy_of(folder: Path, to: Path, run: str, step: int) -> Path:
    """A copy of a store, made when the saver of a killed program has committed its last save."""
    with ckpt.Checkpointer(str(folder), run=run) as found:
        wait_until(lambda: (newest := found.latest()) is not None and newest.step == step)
    shutil.copytree(folder / run, to / run)
    return to
