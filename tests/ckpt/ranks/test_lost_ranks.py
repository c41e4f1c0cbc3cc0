from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ckpt import Checkpointer
from ckpt.restoring import sharing
from ckpt.restoring.destinations import Destinations
from ckptstore.commits.leases import active_leases
from ckptstore.errors import CkptError, RankLost
from ckptstore.reading import fetch as reading
from ckptstore.reading.source import StoreSource
from ckptstore.reading.verify import verify
from ckptstore.retention.deletion import collect, undecided_attempts
from ckptstore.run import Run
from ckptstore.stores import Store, open_store
from tests.support.parallel.runner import Outcome, Scenario, run_named
from tests.support.stores import MovableClock
from tests.support.waiting import wait_until

_TIMEOUT_S = 6.0
_COMMIT_TIMEOUT_S = 8.0
_HOW = ("SIGKILL", "SIGSTOP")
_RESTORES = [
    *product((2,), _HOW, ("meeting", "placing"), ("broadcast",)),  # there, how replicas read makes no difference
    *product((2,), _HOW, ("fetching",), ("broadcast", "none")),
    (0, "SIGKILL", "fetching", "broadcast"),
    (0, "SIGSTOP", "placing", "none"),
]


@dataclass
class Lost:
    """What the ranks of all scenarios said, and their stores."""

    folder: Path
    outcomes: dict[object, Outcome]

    def store(self, name: str) -> Store:
        return open_store(str(self.folder / name))


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lost]:
    """All at the same time: most of it is waiting."""
    folder = tmp_path_factory.mktemp("lost")
    with Checkpointer(str(folder / "store"), run=RUN, writer="thread", compress="fast") as checkpointer:
        checkpointer.save(model(), None, 1)
    at: dict[str, Any] = {"folder": str(folder)}
    scenarios: dict[object, Scenario] = {}
    for case in _RESTORES:
        arguments = (
            at | {"timeout_s": _TIMEOUT_S} | dict(zip(("lost", "how", "phase", "replica_reads"), case, strict=True))
        )
        scenarios[case] = Scenario(f"{__name__}:restore", 3, arguments, lost=(case[0],))
    for how in _HOW:
        arguments = {**at, "lost": 2, "how": how, "peer_timeout_s": _COMMIT_TIMEOUT_S}
        scenarios[how] = Scenario(f"{__name__}:save", 3, arguments, lost=(2,))
    arguments = {**at, "lost": 1, "timeout_s": _TIMEOUT_S}
    scenarios["first"] = Scenario(f"{__name__}:first_save", 3, arguments, lost=(1,))
    ranks = folder / "ranks"
    try:
        yield Lost(folder, run_named(scenarios, ranks, together=True))
    finally:
        # A saver that is stopped does not notice that its trainer has ended.
        os.kill(int((folder / "saver-SIGSTOP").read_text()), signal.SIGKILL)


@pytest.mark.parametrize(("rank", "how", "phase", "replica_reads"), _RESTORES)
def test_lost_in_a_restore(lost: Lost, rank: int, how: str, phase: str, replica_reads: str) -> None:
    results = lost.outcomes[rank, how, phase, replica_reads].result()
    for result in (result for other, result in enumerate(results) if other != rank):
        assert f"rank {rank} of 3 sent no heartbeat" in result["said"]
        assert result["threads"] == []


def test_a_failed_restore_holds_no_lease(lost: Lost) -> None:
    """Rank 0's leases are those of the scenarios in which it was lost itself."""
    held = active_leases(Run(lost.store("store"), RUN))
    assert sum(map(len, held.values())) == sum(rank == 0 for rank, *_ in _RESTORES)


def test_missing_at_the_first_save(lost: Lost) -> None:
    results = lost.outcomes["first"].result()
    for result in (results[0], results[2]):
        assert "rank 1 of 3 sent no heartbeat" in result["said"]
    assert list(lost.store("first-save").list("")) == []


@pytest.mark.parametrize("how", _HOW)
def test_lost_in_a_save(lost: Lost, how: str) -> None:
    """The others go on, nothing is committed, and the attempts are collected when they are old."""
    results = lost.outcomes[how].result()
    for result in results[:2]:
        assert [code for code, _ in result["errors"]] == ["save_failed"] * 2
        assert result["done"] == [False, False], "save_async waited for the lost rank"
    assert "ranks [2] of 3 did not finish attempt 000001-000000000002-" in results[0]["errors"][0][1]

    store, clock = lost.store(how), MovableClock()
    run, source = Run(store, RUN, clock), StoreSource(store)
    undecided = undecided_attempts(run)
    assert ([attempt.step for attempt in undecided], collect(run).aborted) == ([2, 3], [])
    clock.advance(2 * 24 * 3600)
    assert collect(run).aborted == list(map(run.id_of, undecided))
    assert [checkpoint.step for checkpoint in source.checkpoints(RUN)] == [1]
    assert verify(source, source.latest(RUN)).ok


RUN = "lost"


def model() -> nn.Module:
    """Several megabytes, so that there are several rounds of them."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(700, 700) for _ in range(4)))


def restore(folder: str, lost: int, how: str, phase: str, replica_reads: Any, timeout_s: float) -> dict[str, Any]:
    sharing.ROUND_BYTES = 1 << 20
    rank, loss = dist.get_rank(), Loss(how)
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

    def named() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("ckpt-")]

    with suppress(AssertionError):
        wait_until(lambda: not named())
    return named()
