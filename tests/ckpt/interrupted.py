"""A small training program that an exception of a signal handler interrupts at one line, which catches it and goes on.

`python -m tests.ckpt.interrupted PART OF` raises at every line that the training thread visits in the watched files, in
each call of the program that visits it, of which it does one part; prints what it found as JSON. sys.settrace puts the
exception between two lines, on the training thread alone, as signal handlers do. Each attempt has a process of its own:
one that hangs or crashes is a finding, too.
"""

from __future__ import annotations

import errno
import faulthandler
import functools
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import ckptstore
from ckpt import Checkpointer, CkptError
from ckpt.snapshot.arena import Arena
from tests.ckpt.snapshot.simulated import PromptDevice, plugged_in

WATCHED = ("ckpt/snapshot/", "ckpt/restoring/", "ckpt/saver/", "ckptstore/threads.py")
_ROOT = str(Path(ckptstore.__file__).parents[1]) + "/"
_PATIENCE_S = 100
_MEMORY = "/dev/shm"


class Alarm(Exception):
    """A program's own, raised by its handler of SIGALRM."""


KINDS: tuple[type[BaseException], ...] = (KeyboardInterrupt, MemoryError, Alarm)
MODES = ("overlap", "eager", "process", "live", "device")
Line = tuple[str, str, int]
"""A call of the program, a file, and a line that the call visits."""


@functools.cache
def _is_watched(file: str) -> bool:
    return file.startswith(tuple(_ROOT + part for part in WATCHED))


@dataclass
class Interruption:
    """Raises once, where a call reaches a line; notes the lines that are reached."""

    kind: type[BaseException] = KeyboardInterrupt
    line: Line | None = None
    raised: bool = False
    seen: dict[Line, None] = field(default_factory=dict)
    call: str = ""

    def __enter__(self) -> None:
        if self.line is None or self.line[0] == self.call:
            sys.settrace(self._called)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        watched = _is_watched(code.co_filename) and code.co_name not in ("<module>", "__del__")
        return self._reached if watched else None

    def _reached(self, frame: FrameType, event: str, arg: Any) -> Any:
        line = (self.call, frame.f_code.co_filename.removeprefix(_ROOT), frame.f_lineno)
        if event == "line":
            self.seen.setdefault(line)
            if line == self.line and not self.raised:
                self.raised = True
                raise self.kind(f"at {line}")
        return self._reached


class Program:
    """Trains and saves in one mode."""

    def __init__(self, mode: str, folder: str, interruption: Interruption) -> None:
        self._interruption = interruption
        writer: Any = "process" if mode == "process" else "thread"
        self._run = Checkpointer(folder, run="r", slots=1, overlap=mode != "eager", writer=writer)
        self._model = nn.ParameterDict({"large": torch.zeros(5000), "small": torch.zeros(3)})
        self._model.register_buffer("buffer", torch.zeros(7))
        self._optim = torch.optim.SGD(self._model.parameters(), lr=1.0, momentum=0.5)
        self._expected: dict[int, dict[str, torch.Tensor]] = {}
        self._accepted: list[Any] = []
        self._step = 0

    def __call__(self) -> None:
        """Raises AssertionError, or whatever the program did not expect."""
        self._plainly(self._save_sync)
        self._train()
        self._interrupted("save_async", lambda: self._accepted.append(self._save()))
        self._interrupted("step", self._train)
        self._interrupted("save", self._save_sync)
        self._interrupted("wait", lambda: self._run.wait(_PATIENCE_S))
        if not self._interrupted("restore", self._restore):
            self._restore()
        self._train()
        self._plainly(self._save_sync)
        if not self._interrupted("close", lambda: self._run.close(_PATIENCE_S)):
            self._train()
            self._plainly(self._save_sync)
        self._plainly(lambda: self._run.close(_PATIENCE_S))
        assert all(handle.result(0) for handle in self._accepted)
        for checkpoint in self._run._source.checkpoints("r"):
            stored, expected = self._run.load(checkpoint.step), self._expected[checkpoint.step]
            differing = [name for name, value in expected.items() if not torch.equal(stored[name], value)]
            assert not differing, f"step {checkpoint.step} is not the state of its call: {differing}"

    def _interrupted(self, call: str, action: Callable[[], object]) -> bool:
        """Whether the action came to its end; if not, because of the interruption."""
        if self._interruption.raised:
            self._plainly(action)
            return True
        self._interruption.call = call
        try:
            with self._interruption:
                action()
        except (KeyboardInterrupt, MemoryError, Alarm, CkptError):
            assert self._interruption.raised
            return False
        return True

    def _plainly(self, action: Callable[[], object]) -> None:
        """An action may raise the error of an earlier save once."""
        try:
            action()
        except CkptError:
            assert self._interruption.raised
            action()

    def _save(self) -> Any:
        self._step += 1
        parameters = dict(self._model.items())
        momenta = {f"optim/state/{name}/momentum_buffer": self._optim.state[p] for name, p in parameters.items()}
        self._expected[self._step] = {
            **{f"model/{name}": value.detach().clone() for name, value in self._model.state_dict().items()},
            **{name: value["momentum_buffer"].clone() for name, value in momenta.items() if value},
        }
        return self._run.save_async(self._model, self._optim, self._step, extra={"step": self._step})

    def _save_sync(self) -> None:
        self._save().result(_PATIENCE_S)

    def _train(self) -> None:
        with torch.no_grad():
            self._model.get_buffer("buffer").add_(1)
        for parameter in self._model.values():
            parameter.grad = torch.ones_like(parameter)
        self._optim.step()

    def _restore(self) -> None:
        restored = self._run.restore(self._model, self._optim, extra={"step": 0})
        assert restored is not None
        expected = self._expected[restored.step]
        assert all(torch.equal(value, expected[f"model/{name}"]) for name, value in self._model.state_dict().items())
        assert restored.values["extra"] == {"step": restored.step}


def attempt(mode: str, interruption: Interruption) -> str | None:
    """What was wrong, if anything was."""
    faulthandler.dump_traceback_later(3 * _PATIENCE_S, exit=True)
    no_memory = patch.object(Arena, "_check_memory", side_effect=OSError(errno.ENOMEM, "no memory"))
    special: dict[str, Any] = {"live": no_memory, "device": plugged_in(0, PromptDevice)}
    place = _MEMORY if os.path.isdir(_MEMORY) else None  # most of an attempt would be syncs of a disk
    with tempfile.TemporaryDirectory(dir=place, ignore_cleanup_errors=True) as folder:
        try:
            with special.get(mode, nullcontext()):
                Program(mode, folder, interruption)()
        except BaseException as error:
            return f"{mode}, {interruption.kind.__name__} at {interruption.line}: {error!r}"
        finally:
            faulthandler.cancel_dump_traceback_later()
    return None


def attempt_in_fork(mode: str, interruption: Interruption) -> str | None:
    """The same in a process of its own."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        wrong = attempt(mode, interruption)
        with open(writer, "w") as told:
            json.dump([wrong, interruption.raised, list(interruption.seen)], told)
        os._exit(0)
    os.close(writer)
    with open(reader) as heard:
        said = heard.read()
    _, status = os.waitpid(pid, 0)
    if not said:
        return f"{mode}, {interruption.kind.__name__} at {interruption.line}: ended with {status}"
    wrong, interruption.raised, seen = json.loads(said)
    interruption.seen = dict.fromkeys(map(tuple, seen))
    return None if wrong is None else str(wrong)


def main(part: int, of: int) -> None:
    """Raise at each line that an uninterrupted program visits, in each mode, an exception of each kind."""
    logging.disable()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"lines": 0, "raised": 0, "findings": []}
    number = 0
    for mode in MODES:
        visited = Interruption()
        assert (wrong := attempt_in_fork(mode, visited)) is None, wrong
        found["lines"] += len(visited.seen)
        for line in visited.seen:
            for kind in KINDS:
                number += 1
                if number % of == part:
                    interruption = Interruption(kind, line)
                    if wrong := attempt_in_fork(mode, interruption):
                        found["findings"].append(wrong)
                    found["raised"] += interruption.raised
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
