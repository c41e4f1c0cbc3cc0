"""Three ranks, one of which gets SIGTERM at a random moment, on disks of several speeds.

All ranks end at the same step with the same exit code; 75 means that this step is durable; and the loss curve after the
restart is that of a job that was not interrupted. CKPTD_PREEMPTIONS=100 takes so many moments, checks the deadline and
the estimates as well, which needs a quiet machine, and prints a table.
"""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ckpt.preemption import EXIT_BEHIND, EXIT_SAVED
from ckptstore.commits.catalog import latest
from ckptstore.run import Run
from ckptstore.stores import open_store
from tests.support.forking import TRAINER, fork
from tests.support.ports import free_port
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
MOMENTS = int(os.environ.get("CKPTD_PREEMPTIONS", "4"))
BY_HAND = "CKPTD_PREEMPTIONS" in os.environ
RANKS, STEPS = 3, 250
RATES = (1e6, 4e6, 1e9)


@dataclass
class Job:
    """The ranks of a job, and what they wrote."""

    log: Path
    ranks: list[Any]

    @classmethod
    def start(cls, folder: Path, name: str, grace_s: float, rate: float, pace_s: float = 0.0) -> Job:
        log = folder / name
        slow = {
            "PYTHONPATH": f"{ROOT / 'tests/support/slow_disk'}:{os.environ.get('PYTHONPATH', '')}",
            "CKPTD_TEST_DISK_BYTES_PER_S": str(rate),
            "CKPTD_TEST_DISK_LOCK": str(folder / "disk"),
            "PACE_S": str(pace_s),
        }
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(RANKS)}
        arguments = [str(folder / "store"), str(STEPS), str(grace_s), str(log)]
        ranks = []
        for rank in range(RANKS):
            with (folder / f"{name}.{rank}.err").open("w") as errors:
                environment = {**os.environ, **slow, **meeting, "RANK": str(rank)}
                module = "tests.ckpt.preempted"
                ranks.append(
                    fork(TRAINER, module, arguments, stdout=2, stderr=errors.fileno(), environment=environment)
                )
        return cls(log, ranks)

    def lines(self, rank: int, first: str) -> list[list[str]]:
        path = Path(f"{self.log}.{rank}")
        lines = path.read_text().splitlines() if path.exists() else []
        return [words for line in lines if (words := line.split())[:1] == [first]]

    def finish(self) -> list[int]:
        return [rank.wait(200) for rank in self.ranks]

    def curve(self) -> dict[int, str]:
        return {int(step): loss for _, step, loss in self.lines(0, "step")}

    def errors(self) -> str:
        return "\n".join(Path(f"{self.log}.{rank}.err").read_text() for rank in range(RANKS))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The losses of a job that nothing interrupts."""
    job = Job.start(tmp_path_factory.mktemp("reference"), "whole", 60.0, 1e9)
    assert job.finish() == [0] * RANKS, job.errors()
    return job.curve()


_table: list[str] = []


@pytest.mark.parametrize("seed", range(MOMENTS))
def test_a_preempted_job_ends_at_one_step_and_goes_on_from_it(
    seed: int, reference: dict[int, str], tmp_path: Path
) -> None:
    chance = random.Random(seed)
    rate, grace_s = RATES[seed % len(RATES)], chance.choice([6.0, 10.0, 20.0])
    job = Job.start(tmp_path, "first", grace_s, rate, pace_s=0.05)
    wait_until(lambda: all(len(job.lines(rank, "step")) >= 2 for rank in range(RANKS)), "training")
    committed = tmp_path / "store" / "r" / "commits"
    if seed % 4:  # otherwise the first save may be under way, or ahead
        wait_until(lambda: committed.exists() and any(committed.glob("000001-*")), "the first save")
    time.sleep(chance.uniform(0.0, 4.0))
    noticed_at = time.time()
    job.ranks[chance.randrange(RANKS)].send_signal(signal.SIGTERM)
    codes = job.finish()
    assert len(set(codes)) == 1, (codes, job.errors())
    ends = [job.lines(rank, "end")[0] for rank in range(RANKS)]
    assert len({end[1] for end in ends}) == 1, ends
    last, durable = int(ends[0][1]), latest(Run(open_store(str(tmp_path / "store")), "r")).step
    assert codes[0] in (EXIT_SAVED, EXIT_BEHIND), (codes, job.errors())
    assert (durable == last) if codes[0] == EXIT_SAVED else (durable < last), (codes, durable, last)
    if BY_HAND:
        _judge(job, rate, grace_s, noticed_at, codes[0])
    again = Job.start(tmp_path, "again", 60.0, 1e9)
    assert again.finish() == [0] * RANKS, again.errors()
    curve = again.curve()
    assert min(curve) == durable + 1
    assert {**{step: loss for step, loss in job.curve().items() if step <= durable}, **curve} == reference


def _judge(job: Job, rate: float, grace_s: float, noticed_at: float, code: int) -> None:
    ends = [job.lines(rank, "end")[0] for rank in range(RANKS)]
    ended_at = max(float(end[3]) for end in ends)
    due, estimate = job.lines(0, "due"), ends[0][4]
    took = float(ends[0][3]) - float(due[-1][2]) if due and code == EXIT_SAVED else None
    _table.append(
        f"{rate:9.0f} B/s grace {grace_s:4.0f} s, ended after {ended_at - noticed_at:5.2f} s, exit {code}, "
        f"estimate {estimate}, took {took}"
    )
    print(_table[-1], flush=True)
    assert ended_at - noticed_at <= grace_s or estimate == "None"
