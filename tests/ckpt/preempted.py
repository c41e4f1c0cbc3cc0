"""A job that is preempted: `preempted STORE STEPS GRACE`. Ranks train, load data and evaluate; one gets a signal.

Each rank prints "step RANK STEP LOSS", and at the end "end RANK STEP".
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

from ckpt import Checkpointer
from ckpt.schedule import Schedule
from tests.ckpt.data.killed import say
from tests.support.training import seed_all

WIDTH = 512
pace_s = float(os.environ["PACE_S"])
"""The time of a step, at least; 0: no other work either."""


def pause(schedule: Schedule, seconds: float) -> None:
    """Load data, or evaluate: work between steps that ends early at notice."""
    if not pace_s:
        return
    end = time.monotonic() + seconds
    while time.monotonic() < end and not schedule.noticed:
        time.sleep(0.01)


def average_gradients(model: nn.Module) -> None:
    """By one sum of all. DistributedDataParallel groups them differently in its first step: another rounding."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    parts = torch.split(flat, [gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient) / dist.get_world_size())


def main(store: str, steps: int, grace_s: float) -> int:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    seed_all(0)
    model = nn.Sequential(nn.Linear(8, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    seed_all(rank)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Checkpointer(store, run="r", split_replicas=True, compress="fast") as checkpointer:
        checkpointer.on_preemption(grace_s=grace_s)
        restored = checkpointer.restore(model, optim)
        step = restored.step if restored else 0
        schedule = checkpointer.every(seconds=1.5, overhead=None)
        while step < steps:
            if step % 7 == 0:
                pause(schedule, 0.05)
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            average_gradients(model)
            optim.step()
            optim.zero_grad()
            step += 1
            say("step", rank, step, loss.item().hex())
            if schedule.due(step):
                checkpointer.save_async(model, optim, step)
            if schedule.stop:
                break
            if step % 20 == 0:
                pause(schedule, 0.3)
            time.sleep(pace_s)
        checkpointer.wait()
        say("end", rank, step)
    dist.destroy_process_group()
    return schedule.exit_code or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
