"""What ranks do in tests of schedules: scenarios for tests.support.parallel.runner."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ckpt import Checkpointer
from ckpt.schedule import Limits, Schedule
from ckpt.snapshot.handle import HandleUpdates, SaveHandle
from ckptstore.errors import RankLost, SaveFailed
from tests.support.waiting import wait_until

_STEPS = 400


def train_unevenly(slowest: int, stride: int) -> dict[str, Any]:
    """Ranks that nothing keeps in step, at speeds that change; rank 2 asks for a save in between."""
    rank = dist.get_rank()
    schedule = Schedule(lambda: None, Limits(0.05, None), peer_timeout_s=20.0, lead_s=0.1)
    pace = random.Random(rank)
    due = []
    for step in range(0, stride * _STEPS, stride):
        time.sleep(pace.expovariate(1 / (0.003 if rank == slowest else 0.001)))
        if step == 100 * stride and rank == 2:
            schedule.request()
        due += [step] if schedule.due(step) else []
    dist.barrier()  # the store may live in rank 0
    schedule.close()
    return {"due": due}


def request_from(asking: int) -> dict[str, Any]:
    """Ranks in step; one asks for a save that no interval makes due."""
    rank = dist.get_rank()
    schedule = Schedule(lambda: None, Limits(3600.0, None), peer_timeout_s=20.0, lead_s=0.2)
    due, asked_at = [], 50
    for step in range(200):
        if step == asked_at and rank == asking:
            schedule.request()
        time.sleep(0.005)
        due += [step] if schedule.due(step) else []
        dist.barrier()
    schedule.close()
    return {"due": due}


def save_by_schedule(store: str) -> dict[str, Any]:
    """Data parallel training that saves when it is due."""
    model = torch.nn.Linear(8, 8)
    optim = torch.optim.Adam(model.parameters())
    saved = []
    with Checkpointer(store, run="scheduled", writer="thread") as checkpointer:
        schedule = checkpointer.every(seconds=0.05, overhead=None)
        for step in range(1, 30):
            model(torch.ones(8)).sum().backward()
            optim.step()
            if schedule.due(step):
                checkpointer.save_async(model, optim, step)
                saved.append(step)
            time.sleep(0.01)
            dist.barrier()
    dist.barrier()
    outcomes = Path(store, "scheduled", "commits").glob("000001-*")
    return {"saved": saved, "on the store": sorted(path.name for path in outcomes)}


def save_with_a_straggler() -> dict[str, Any]:
    """By a clock that the steps move: 10 s each. A save costs rank 0 0.2 s and rank 1 ten times as much."""
    rank, now = dist.get_rank(), 0.0
    newest: SaveHandle | None = None
    schedule = Schedule(lambda: newest, Limits(None, 0.02), peer_timeout_s=20.0, clock=lambda: now, lead_s=0.1)
    due: list[int] = []
    for step in range(60):
        now = 10.0 * step
        if schedule.due(step):
            due.append(step)
            updates = HandleUpdates(step, 0)
            newest = updates.handle
            updates.measure(blocked_s=0.2, held_s=1.8 if rank == 1 else 0.0)
            updates.fail(SaveFailed("it does not matter how it ends"))
        dist.barrier()
        if rank == 0 and due and step > due[-1]:
            wait_until(lambda: schedule._broadcast is not None and schedule._broadcast.cost == (len(due), 2.0))
    dist.barrier()
    schedule.close()
    return {"due": due}


def lose_rank_zero(timeout_s: float) -> dict[str, Any]:
    """Rank 0 stops; the others come to the end of what it said."""
    schedule = Schedule(lambda: None, Limits(3600.0, None), peer_timeout_s=timeout_s, lead_s=0.05)
    step = 0
    try:
        for step in range(10_000):
            if step == 100 and dist.get_rank() == 0:
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.002)
            started = time.monotonic()
            schedule.due(step)
    except RankLost as error:
        seconds = time.monotonic() - started
        schedule.close()
        return {"said": str(error), "seconds": seconds, "step": step}
    return {"said": "nothing", "step": step}
