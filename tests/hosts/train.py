"""A training job on several hosts: `train OPTIONS`, a JSON object with the fields of Options.

Ranks print "read RANK MEMORY STORE LOCAL PEER" (bytes of the restore), "step RANK STEP LOSS" and "saved RANK STEP";
rank 0 prints "resumed STEP" first.
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

import torch.distributed as dist

from ckpt import Checkpointer, SaveHandle
from tests.ckpt.data.killed import say
from tests.support.parallel.built import Setup, seeded
from tests.support.parallel.layouts import LAYOUTS
from tests.support.waiting import DEADLINE_S


@dataclass(frozen=True)
class Options:
    """What the job does."""

    store: str
    run: str = "job"
    layout: str = "ddp"
    steps: int = 1_000_000
    every: int = 4
    """Steps from save to save; each is durable before the next step."""
    pace_s: float = 0.0
    grace_s: float | None = None
    """Of preemption notices; then saves are decided by a schedule."""
    settings: dict[str, Any] = field(default_factory=dict)


def main(options: Options) -> int:
    dist.init_process_group("gloo", timeout=timedelta(seconds=DEADLINE_S))
    rank = dist.get_rank()
    seeded()
    built = LAYOUTS[options.layout].build(Setup())
    model: Any = built.model
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
        saving: SaveHandle | None = None
        while step < options.steps:
            loss = built.train_step(step)
            step += 1
            say("step", rank, step, loss.hex())
            if schedule is not None and schedule.due(step):
                saving = checkpointer.save_async(model, built.optim, step)
            elif schedule is None and step % options.every == 0:
                checkpointer.save(model, built.optim, step)
                say("saved", rank, step)
            if schedule is not None and schedule.stop:
                break
            if saving is not None and saving.committed:
                say("saved", rank, saving.step)
                saving = None
            time.sleep(options.pace_s)
        checkpointer.wait()
        say("end", rank, step)
        exit_code = (schedule.exit_code if schedule is not None else None) or 0
    dist.destroy_process_group()
    return exit_code


if __name__ == "__main__":
    code = main(Options(**json.loads(sys.argv[1])))
    atexit._run_exitfuncs()  # taking torch down takes longer than the job
    os._exit(code)
