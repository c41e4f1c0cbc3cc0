"""Runs scenarios one after the other, each in freshly forked ranks; torch is imported once.

    python -m tests.support.parallel.host <folder> [together]

The folder has scenarios.json. Every scenario gets a folder of its own there, by its number, with what each rank
printed and returned, and outcome.json at the end. A rank that fails ends its scenario; so does a time-out, and
then every rank prints where it hangs. With "together", all scenarios run at the same time.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import torch._dynamo  # noqa: F401 - the first optimizer of a process imports it
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, TCPStore

GRACE_S = 5.0
"""For the others to notice that a rank has failed, before they are killed."""


def main(folder: Path, together: bool) -> None:
    os.setsid()  # so that one signal ends this process and its ranks
    scenarios = json.loads((folder / "scenarios.json").read_text())
    for scenario in scenarios:
        _function(scenario)
    warnings.simplefilter("error")  # only now: importing parts of torch warns
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not be forked"
    gc.freeze()  # else the first collection of each rank copies every page it shares with the others
    size = len(scenarios) if together else 1
    for start in range(0, len(scenarios), size):
        some = range(start, min(start + size, len(scenarios)))
        for running in [_start(scenarios[number], folder / str(number)) for number in some]:
            running.finish()


@dataclass
class Running:
    scenario: dict[str, Any]
    place: Path
    pids: dict[int, int]
    """By rank."""
    deadline: float

    def finish(self) -> None:
        """Wait for the ranks, end those that are late or expected to hang, and write down what went wrong."""
        failed, late = self._wait()
        for rank in late:
            os.kill(self.pids[rank], signal.SIGUSR1)  # prints every thread's stack
        if late:
            time.sleep(0.5)
        for rank, pid in self.pids.items():
            if rank in late or rank in self.scenario["lost"]:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        unfinished = self.place / "outcome.tmp"
        unfinished.write_text(json.dumps(self._error(failed, late)))
        unfinished.rename(self.place / "outcome.json")

    def _wait(self) -> tuple[list[int], list[int]]:
        """Until all have ended of which it is expected; the ranks that failed, and those that are late."""
        failed: list[int] = []
        waiting = [rank for rank in self.pids if rank not in self.scenario["lost"]]
        while waiting and time.monotonic() < self.deadline:
            time.sleep(0.005)
            for rank in list(waiting):
                pid, status = os.waitpid(self.pids[rank], os.WNOHANG)
                if pid == 0:
                    continue
                waiting.remove(rank)
                if status != 0:
                    failed.append(rank)
                    self.deadline = min(self.deadline, time.monotonic() + GRACE_S)
        return failed, waiting

    def _error(self, failed: list[int], late: list[int]) -> str | None:
        if not failed and not late:
            return None
        what = f"{self.scenario['function']} {self.scenario['arguments']}"
        shown = [f"{what}: {'late' if late else 'failed'}: ranks {late or failed}"]
        shown += [f"--- rank {rank}\n{(self.place / f'rank-{rank}.txt').read_text()}" for rank in self.pids]
        return "\n".join(shown)


def _start(scenario: dict[str, Any], place: Path) -> Running:
    place.mkdir()
    pids = {}
    for rank in range(scenario["world_size"]):
        pid = os.fork()
        if pid == 0:
            _become(rank, scenario, place)
        pids[rank] = pid
    return Running(scenario, place, pids, time.monotonic() + scenario["timeout_s"])


def _become(rank: int, scenario: dict[str, Any], place: Path) -> NoReturn:
    """In the child: be the rank, and end."""
    output = os.open(place / f"rank-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    code = 1
    try:
        result = _call(rank, scenario, place)
        (place / f"rank-{rank}.json").write_text(json.dumps(result))
        code = 0
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()  # coverage writes its data here; taking torch down takes longer than most scenarios
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _call(rank: int, scenario: dict[str, Any], place: Path) -> Any:
    function = _function(scenario)
    if scenario["world_size"] == 1:
        return function(**scenario["arguments"])
    store = _tcp_store(rank, place) if scenario["tcp"] else FileStore(str(place / "meeting"))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=scenario["world_size"])
    dist.barrier()  # a rank that is to be lost is lost to a group that was complete
    try:
        return function(**scenario["arguments"])
    finally:
        dist.destroy_process_group()


def _tcp_store(rank: int, place: Path) -> TCPStore:
    """Rank 0 has it, on a free port."""
    told = place / "port"
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        unfinished = place / "port.tmp"
        unfinished.write_text(str(store.port))
        unfinished.rename(told)
        return store
    while not told.exists():
        time.sleep(0.005)
    return TCPStore("127.0.0.1", int(told.read_text()), wait_for_workers=False)


def _function(scenario: dict[str, Any]) -> Callable[..., Any]:
    module, _, name = scenario["function"].partition(":")
    return cast("Callable[..., Any]", getattr(importlib.import_module(module), name))


if __name__ == "__main__":
    main(Path(sys.argv[1]), "together" in sys.argv[2:])
