"""A trainer for bench.goodput: steps that take a known time, and a stopwatch of its own in a file beside the store."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import ckpt.config
from ckpt import Checkpointer

STEP_S = 0.1
EVERY = 20
SIZE = 4 << 20


def main() -> None:
    """goodput_trainer STORE LOG LAST_STEP: train until the last step, a kill or SIGTERM."""
    store, path, last = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    log = path.open("a", buffering=1)

    def note(kind: str, **values: float) -> None:
        log.write(json.dumps({"kind": kind, "at": time.time(), **values}) + "\n")

    model = nn.ParameterDict({"w": torch.randn(SIZE)})
    optim = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    ckpt.config.HEARTBEAT_S = 1.0
    with Checkpointer(store, run="run", compress="fast") as checkpointer:
        started = time.perf_counter()
        restored = checkpointer.restore(model, optim)
        first = restored.step if restored else 0
        note("restored", seconds=time.perf_counter() - started if restored else 0.0, step=first)
        schedule = checkpointer.every(3600, overhead=None)
        stop: list[int] = []

        def terminate(*_: object) -> None:
            stop.append(1)
            schedule.request()

        signal.signal(signal.SIGTERM, terminate)
        for step in range(first + 1, last + 1):
            began = time.perf_counter()
            model["w"].grad = torch.ones_like(model["w"])
            optim.step()
            time.sleep(max(0.0, STEP_S - (time.perf_counter() - began)))
            requested = schedule.due(step)
            note("step", step=step)
            if step % EVERY == 0 or stop or requested:
                began = time.perf_counter()
                checkpointer.save_async(model, optim, step)
                note("saved", step=step, seconds=time.perf_counter() - began)
            if stop:
                break
        note("closing")
    note("closed")


if __name__ == "__main__":
    main()
