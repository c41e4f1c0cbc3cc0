"""Ranks that end or hang in the middle of a save or restore: scenarios for tests.support.parallel.runner."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ckpt import Checkpointer
from ckpt.restoring import sharing
from ckpt.restoring.destinations import Destinations
from ckptstore.errors import CkptError, RankLost
from ckptstore.reading import fetch as reading
from tests.support.waiting import wait_until

RUN = "lost"


def model() -> nn.Module:
    """Several megabytes, so that there are several rounds of them."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(700, 700) for _ in range(4)))


def restore(folder: str, lost: int, how: str, phase: str, replica_reads: Any, timeout_s: float) -> dict[str, Any]:
    """One rank is lost in a phase of the restore; what the others say, and what they leave."""
    sharing.ROUND_BYTES = 1 << 20
    rank = dist.get_rank()
    loss = Loss(how)
    if rank == lost:
        loss.happens_in(phase)
    options: dict[str, Any] = {"writer": "thread", "peer_timeout_s": timeout_s, "replica_reads": replica_reads}
    with Checkpointer(f"{folder}/store", run=RUN, **options) as checkpointer:
        try:
            checkpointer.restore(model())
        except RankLost as error:
            return {"said": str(error), "threads": _threads()}
    return {"said": "restored"}


def first_save(folder: str, lost: int, timeout_s: float) -> dict[str, Any]:
    """One rank never comes to the first save."""
    loss = Loss("SIGKILL")
    if dist.get_rank() == lost:
        loss.happen()
    with Checkpointer(f"{folder}/first-save", run=RUN, writer="thread", peer_timeout_s=timeout_s) as checkpointer:
        try:
            checkpointer.save_async(model(), None, 1)
        except RankLost as error:
            return {"said": str(error)}
    return {"said": "saved"}


def save(folder: str, lost: int, how: str, peer_timeout_s: float) -> dict[str, Any]:
    """One rank and its saver are lost during the second save; the others go on to a third."""
    found: dict[str, Any] = {"errors": [], "done": []}
    net, step = model(), 1
    with Checkpointer(f"{folder}/{how}", run=RUN, peer_timeout_s=peer_timeout_s) as checkpointer:
        checkpointer.save(net, None, step, position=dist.get_rank())
        for step in (2, 3):
            if dist.get_rank() == lost:
                assert checkpointer.saver_pid is not None
                os.kill(checkpointer.saver_pid, signal.SIGSTOP)
                checkpointer.save_async(net, None, step, position=dist.get_rank())
                (Path(folder) / f"saver-{how}").write_text(str(checkpointer.saver_pid))
                os.kill(checkpointer.saver_pid, getattr(signal, how))
                os.kill(os.getpid(), getattr(signal, how))
            handle = checkpointer.save_async(net, None, step, position=dist.get_rank())
            found["done"].append(handle.done())
            try:
                handle.result(60)
            except CkptError as error:
                found["errors"].append([error.code, error.message])
    return found


class Loss:
    """The loss of this rank."""

    def __init__(self, how: str) -> None:
        self._how = how
        self._lock = threading.Lock()

    def happen(self, *_: object, **__: object) -> None:
        """Now. The first thread that comes here takes the others with it."""
        self._lock.acquire()
        os.kill(os.getpid(), getattr(signal, self._how))

    def happens_in(self, phase: str) -> None:
        """Let it happen at the start, when the first chunk has arrived, or when all have."""
        where: dict[str, Callable[[], None]] = {
            "meeting": self.happen,
            "fetching": self._when_fetching,
            "placing": lambda: setattr(Destinations, "place", self.happen),
        }
        where[phase]()

    def _when_fetching(self) -> None:
        for module in (reading, sharing):
            setattr(module, "place_chunk", self.happen)  # noqa: B010 - the name is the other module's


def _threads() -> list[str]:
    """Threads that do not end by themselves."""
    with suppress(AssertionError):
        wait_until(lambda: not _named_threads())
    return _named_threads()


def _named_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ckpt-")]
