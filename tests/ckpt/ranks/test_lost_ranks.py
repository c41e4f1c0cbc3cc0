"""A rank that ends or hangs during a save or a restore: the others stop waiting and name it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest

from ckpt import Checkpointer
from ckptstore.commits.leases import active_leases
from ckptstore.reading.source import StoreSource
from ckptstore.reading.verify import verify
from ckptstore.retention.deletion import collect, undecided_attempts
from ckptstore.run import Run
from ckptstore.stores import Store, open_store
from tests.ckpt.ranks.lost_ranks import RUN, model
from tests.support.parallel.runner import Outcome, Scenario, run_scenarios
from tests.support.stores import MovableClock

_TIMEOUT_S = 6.0
_COMMIT_TIMEOUT_S = 8.0
_HOW = ("SIGKILL", "SIGSTOP")
_RESTORES = [
    *product((2,), _HOW, ("meeting", "fetching", "placing"), ("broadcast", "none")),
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
    at = {"folder": str(folder)}
    scenarios: dict[object, Scenario] = {}
    for case in _RESTORES:
        rank, how, phase, replica_reads = case
        arguments = {
            **at,
            "lost": rank,
            "how": how,
            "phase": phase,
            "replica_reads": replica_reads,
            "timeout_s": _TIMEOUT_S,
        }
        scenarios[case] = Scenario("tests.ckpt.ranks.lost_ranks:restore", 3, arguments, lost=(rank,))
    for how in _HOW:
        arguments = {**at, "lost": 2, "how": how, "peer_timeout_s": _COMMIT_TIMEOUT_S}
        scenarios[how] = Scenario("tests.ckpt.ranks.lost_ranks:save", 3, arguments, lost=(2,))
    arguments = {**at, "lost": 1, "timeout_s": _TIMEOUT_S}
    scenarios["first"] = Scenario("tests.ckpt.ranks.lost_ranks:first_save", 3, arguments, lost=(1,))
    ranks = folder / "ranks"
    ranks.mkdir()
    try:
        found = run_scenarios(list(scenarios.values()), ranks, together=True)
        yield Lost(folder, dict(zip(scenarios, found, strict=True)))
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
    run = Run(store, RUN, clock)
    source = StoreSource(store)
    undecided = undecided_attempts(run)
    assert [attempt.step for attempt in undecided] == [2, 3]
    assert collect(run).aborted == []
    clock.advance(2 * 24 * 3600)
    assert collect(run).aborted == list(map(run.id_of, undecided))
    assert [checkpoint.step for checkpoint in source.checkpoints(RUN)] == [1]
    assert verify(source, source.latest(RUN)).ok
