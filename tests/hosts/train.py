"""A training job on several hosts: `train OPTIONS`, a JSON object with the fields of Options.

Ranks print "read RANK MEMORY STORE LOCAL PEER" (bytes of the restore), "step RANK STEP LOSS", "waited RANK STEP
SECONDS" (training, for save_async) and "saved RANK STEP SECONDS", or "failed" in its place; rank 0 prints "resumed
STEP" first.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ckpt import Checkpointer, SaveHandle
from tests.ckpt.data.killed import say
from tests.support.parallel.built import Setup, seeded
from tests.support.parallel.layouts import LAYOUTS
from tests.support.parallel.model import Shape
from tests.support.waiting import DEADLINE_S, wait_until


@dataclass(frozen=True)
class Options:
    """What the job does."""

    store: str
    run: str = "job"
    layout: str = "ddp"
    steps: int = 1_000_000
    every: int = 4
    """Steps from save to save; each is durable before the next step, or with `background` before the next save."""
    background: bool = False
    pace_s: float = 0.0
    vocabulary: int = 33
    """About 100 bytes of state each."""
    grace_s: float | None = None
    """Of preemption notices; then saves are decided by a schedule."""
    settings: dict[str, Any] = field(default_factory=dict)


def average(bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Average gradients one by one: sums of a bucket depend on its order, which changes in the first step of a job."""
    for gradient in bucket.gradients():
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def main(options: Options) -> int:
    dist.init_process_group("gloo", timeout=timedelta(seconds=DEADLINE_S))
    rank = dist.get_rank()
    seeded()
    built = LAYOUTS[options.layout].build(Setup(Shape(vocabulary=options.vocabulary)))
    model: Any = built.model
    if options.layout == "ddp":
        model.register_comm_hook(None, lambda _, bucket: average(bucket))
    exit_code = 0
    with Checkpointer(options.store, run=options.run, **options.settings) as checkpointer:
        if options.grace_s is not None:
            checkpointer.on_preemption(grace_s=options.grace_s)
        restored = checkpointer.restore(model, built.optim)
        step = restored.step if restored else 0
        if rank == 0:
            say("resumed", step)
        if restored is not None:
            say("read", rank, *(restored.read.get(name, 0) for name in ("memory", "store", "local", "peer")))
        schedule = checkpointer.every(seconds=1.0, overhead=None) if options.grace_s is not None else None
        saves = Saves(rank)
        while step < options.steps:
            loss = built.train_step(step)
            step += 1
            say("step", rank, step, loss.hex())
            if schedule.due(step) if schedule is not None else step % options.every == 0:
                saves.end(wait=options.background)
                saves.begun = time.monotonic()
                saves.newest = checkpointer.save_async(model, built.optim, step)
                say("waited", rank, step, time.monotonic() - saves.begun)
                if schedule is None and not options.background:
                    checkpointer.wait()
            if schedule is not None and schedule.stop:
                break
            saves.end(wait=False)
            time.sleep(options.pace_s)
        checkpointer.wait()
        say("end", rank, step)
        exit_code = (schedule.exit_code if schedule is not None else None) or 0
    dist.destroy_process_group()
    return exit_code


@dataclass
class Saves:
    """What a rank says of its saves."""

    rank: int
    newest: SaveHandle | None = None
    begun: float = 0.0

    def end(self, wait: bool) -> None:
        """Say how the newest one ended."""
        if wait and self.newest is not None:
            wait_until(self.newest.done, "the save")
        if self.newest is not None and self.newest.done():
            seconds = time.monotonic() - self.begun
            say("failed" if self.newest.exception() else "saved", self.rank, self.newest.step, seconds)
            self.newest = None


if __name__ == "__main__":
    code = main(Options(**json.loads(sys.argv[1])))
    atexit._run_exitfuncs()  # taking torch down takes longer than the job
    os._exit(code)
