"""Runs scenarios one after the other, each in freshly forked ranks; torch is imported once.

    python -m tests.support.parallel.host <folder>

The folder has scenarios.json. Every scenario gets a folder of its own there, by its number, with what each rank
printed and returned, and outcome.json at the end. A rank that fails ends its scenario; so does a time-out, and
then every rank prints where it hangs.
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
from pathlib import Path
from typing import Any, NoReturn, cast

import torch._dynamo  # noqa: F401 - the first optimizer of a process imports it
import torch.distributed as dist

GRACE_S = 5.0
"""For the others to notice that a rank has failed, before they are killed."""


def main(folder: Path) -> None:
    """Run all scenarios of the folder."""
    scenarios = json.loads((folder / "scenarios.json").read_text())
    for scenario in scenarios:
        _function(scenario)
    warnings.simplefilter("error")  # only now: importing parts of torch warns
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not be forked"
    gc.freeze()  # else the first collection of each rank copies every page it shares with the others
    for number, scenario in enumerate(scenarios):
        place = folder / str(number)
        place.mkdir()
        error = _run(scenario, place)
        unfinished = place / "outcome.tmp"
        unfinished.write_text(json.dumps(error))
        unfinished.rename(place / "outcome.json")


def _run(scenario: dict[str, Any], place: Path) -> str | None:
    """Fork the ranks and wait; returns what went wrong."""
    world = scenario["world_size"]
    running = {}
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            _become(rank, scenario, place)
        running[pid] = rank
    failed, late = _wait(running, time.monotonic() + scenario["timeout_s"])
    if not failed and not late:
        return None
    shown = [f"{scenario['function']} {scenario['arguments']}: {'late' if late else 'failed'}: ranks {late or failed}"]
    shown += [f"--- rank {rank}\n{(place / f'rank-{rank}.txt').read_text()}" for rank in range(world)]
    return "\n".join(shown)


def _wait(running: dict[int, int], deadline: float) -> tuple[list[int], list[int]]:
    """Until all have ended; the ranks that failed, and those that had to be killed."""
    failed: list[int] = []
    while running and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            time.sleep(0.005)
            continue
        rank = running.pop(pid)
        if status != 0:
            failed.append(rank)
            deadline = min(deadline, time.monotonic() + GRACE_S)
    late = sorted(running.values())
    for pid in running:
        os.kill(pid, signal.SIGUSR1)  # prints every thread's stack
    if running:
        time.sleep(0.5)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return failed, late


def _become(rank: int, scenario: dict[str, Any], place: Path) -> NoReturn:
    """In the child: be the rank, and end."""
    output = os.open(place / f"rank-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
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
    dist.init_process_group(
        "gloo", init_method=f"file://{place / 'meeting'}", rank=rank, world_size=scenario["world_size"]
    )
    try:
        return function(**scenario["arguments"])
    finally:
        dist.destroy_process_group()


def _function(scenario: dict[str, Any]) -> Callable[..., Any]:
    module, _, name = scenario["function"].partition(":")
    return cast("Callable[..., Any]", getattr(importlib.import_module(module), name))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
