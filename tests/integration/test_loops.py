"""The examples of training loops in plain torch: killed with SIGKILL in mid-epoch, and started again."""

from __future__ import annotations

import os
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.command_line import invoke
from tests.support.jobs import Job, kept, killed_and_resumed


def _check(store: Path, *runs: str) -> None:
    for run in runs:
        assert invoke("ls", run, "--store", store).code == 0
        assert invoke("show", f"{run}@latest", "--store", store).code == 0
        assert invoke("verify", f"{run}@latest", "--store", store).code == 0


@pytest.mark.parametrize(
    ("module", "at", "runs"),
    [("examples.ring_allreduce", 13, ["ring"]), ("examples.parameter_server", 23, ["server", "workers"])],
)
def test_every_later_loss_and_the_weights_are_equal(tmp_path: Path, module: str, at: int, runs: list[str]) -> None:
    """Three processes; an epoch has 8 steps of the ring, and 12 of the two workers."""
    with Job(module, ["--store", str(tmp_path / "whole")], 3) as job:
        whole = job.finish()
    store = tmp_path / "killed"
    resumed, lines = killed_and_resumed(module, ["--store", str(store)], 3, at)
    assert 0 < resumed < at
    assert sorted(lines) == sorted(whole)
    _check(store, *runs)


def test_an_asynchronous_server_applies_every_gradient_once(tmp_path: Path) -> None:
    """Two workers, whose gradients come in any order."""
    arguments = ["--store", str(tmp_path)]
    with Job("examples.async_parameter_server", arguments, 3) as job:
        before = []
        for words in job.lines():
            before.append(words)
            if words[:2] == ["update", "33"]:
                break
        job.kill()
    with Job("examples.async_parameter_server", arguments, 3) as job:
        (_, step, digest), *after = job.finish()
    assert before[int(step) - 1] == ["update", step, *before[int(step) - 1][2:4], digest]
    history = [*before[: int(step)], *after]
    assert [int(words[1]) for words in history] == list(range(1, 61))
    for worker in ("1", "2"):
        numbers = [int(words[3]) for words in history if words[2] == worker]
        assert numbers == list(range(1, len(numbers) + 1))
    _check(tmp_path, "async-server")


def test_torchrun_starts_killed_workers_again_and_another_number_of_them_takes_the_rest(tmp_path: Path) -> None:
    """15 steps an epoch on two ranks. Rank 1 is killed at step 5, all at step 11; three ranks take the rest."""
    module, whole_store, store = "examples.elastic", str(tmp_path / "whole"), str(tmp_path / "store")
    with Job(module, ["--store", whole_store], 2) as job:
        whole = [words for words in job.finish() if words[0] == "step"]
    torchrun = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "examples/elastic.py", "--store", store]
    workers: dict[int, int] = {}
    killed: list[int] = []
    resumed = 0
    lines: list[list[str]] = []
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with Job("torch.distributed.run", torchrun, environment=environment) as job:
        try:
            for words in job.lines():
                if words[:1] == ["worker"]:
                    workers[int(words[1])] = int(words[2])
                elif words[:1] == ["resumed"]:
                    assert killed
                    resumed = int(words[1])  # not always 3: others may have gone on before the signal came
                    lines = kept(lines, resumed)
                elif words[:1] == ["step"]:
                    lines.append(words)
                    if words[1:3] == ["1", "5"] and not killed:
                        killed.append(workers[1])
                        os.kill(workers[1], signal.SIGKILL)
                    if words[2] == "11" and resumed:
                        break
        finally:
            job.kill()
            for worker in workers.values():
                with suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)
    assert killed[0] not in workers.values()
    assert resumed % 3 == 0
    assert sorted(lines) == sorted(words for words in whole if int(words[2]) < 11 or words in lines)
    with Job(module, ["--store", store], 3) as job:
        last = [words for words in job.finish() if words[0] in ("step", "resumed")]
    resumed = next(int(words[1]) for words in last if words[0] == "resumed")
    steps = [*kept(lines, resumed), *(words for words in last if words[0] == "step")]
    seen = Counter(int(number) for words in steps if words[4] == "0" for number in words[5:])
    assert seen == Counter(range(120))
    _check(Path(store), "elastic")
