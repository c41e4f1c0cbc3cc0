"""The saver's start: what fails, and children that are forked meanwhile, keep neither locks nor sockets."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from ckpt import Checkpointer
from ckpt.host.lock import try_lock
from ckpt.snapshot import writers
from ckptstore.errors import SaverDied
from tests.ckpt.saver.looking import RUN, forked

Start = Callable[..., Any]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Start], Start]], None]:
    """Replaces the function that starts the saver's process."""
    real = writers._start
    return lambda replaced: monkeypatch.setattr(writers, "_start", replaced(real))


def test_a_saver_that_could_not_start_leaves_nothing_open(tmp_path: Path, start: Any) -> None:
    def failing(real: Start) -> Start:
        failures = iter([OSError(errno.EAGAIN, "no process")] * 2)

        def begin(*descriptors: int) -> Any:
            if (error := next(failures, None)) is not None:
                raise error
            return real(*descriptors)

        return begin

    start(failing)
    model = nn.Linear(2, 2)
    with Checkpointer(str(tmp_path), run=RUN) as checkpointer:
        for _ in range(2):
            with pytest.raises(OSError, match="no process"):
                checkpointer.save(model, None, 1)
            for role in ("trainer", "saver"):
                with try_lock(checkpointer.config.source, RUN, role) as free:
                    assert free, role
        assert checkpointer.save(model, None, 1).step == 1


def test_the_death_of_a_saver_is_noticed_although_a_child_was_forked_while_it_began(tmp_path: Path, start: Any) -> None:
    children: list[tuple[int, Callable[[], None]]] = []
    forking = threading.Thread(target=lambda: children.append(forked()))

    def slow(real: Start) -> Start:
        def begin(*descriptors: int) -> Any:
            forking.start()
            forking.join(1.0)  # the fork waits until the saver has started, after this
            return real(*descriptors)

        return begin

    start(slow)
    model = nn.Linear(2, 2)
    try:
        with Checkpointer(str(tmp_path), run=RUN) as checkpointer:
            checkpointer.save(model, None, 1)
            forking.join()
            assert checkpointer.saver_pid is not None
            os.kill(checkpointer.saver_pid, signal.SIGSTOP)
            handle = checkpointer.save_async(model, None, 2)
            os.kill(checkpointer.saver_pid, signal.SIGKILL)
            with pytest.raises(SaverDied, match="killed by signal 9"):
                handle.result(60)
            with pytest.raises(SaverDied):
                checkpointer.wait()
    finally:
        forking.join()
        for child, end in children:
            end()
            os.waitpid(child, 0)
